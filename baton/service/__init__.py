"""Who starts, watches and ends the processes of a service."""
