"""Sums and products that the ranks of a model share."""
