"""Clients of our own services."""
