"""What both ends say before the first block."""
