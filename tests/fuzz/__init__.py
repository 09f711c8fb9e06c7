"""Malformed input for everything that reads bytes from others: `make fuzz`."""
