"""Requests that wait in files, many to a batch, and run when nobody else needs the workers."""
