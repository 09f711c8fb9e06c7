"""Attention over the paged cache, and what comes before it."""
