"""Shared by the commands: options, access to a service, printing, and exit codes."""
