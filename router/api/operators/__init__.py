"""What operators ask over HTTP, with an operator key."""
