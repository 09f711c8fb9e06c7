"""Callers who try to stop, swell or starve a service."""
