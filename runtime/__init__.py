"""The ground that all processes stand on; it knows nothing of any role."""
