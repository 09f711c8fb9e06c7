"""What `baton top` shows."""
