"""The files that a running service leaves on its machine, where commands of the same user find them."""
