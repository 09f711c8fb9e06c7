"""Logs of the processes of a service: files that are read, merged by time, shown, and kept short."""
