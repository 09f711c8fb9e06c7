"""Clients of a running service, for programs."""
