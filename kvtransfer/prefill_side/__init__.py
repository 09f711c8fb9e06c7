"""Grants in, blocks out."""
