"""Processes of a service as children on this machine."""
