"""How a process of ours starts, serves and ends."""
