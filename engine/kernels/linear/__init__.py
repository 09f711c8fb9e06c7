"""Matrix products of few rows, and rows of 8 bits."""
