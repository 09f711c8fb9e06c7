"""A device's memory: reserved, mapped, exported."""
