"""Engines of a worker: one row and one module each."""
