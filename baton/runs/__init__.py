"""What a running service leaves on its machine, and how commands of the same user find it."""
