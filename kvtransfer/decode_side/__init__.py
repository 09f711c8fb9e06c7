"""Leases, their books, and what arrives under them."""
