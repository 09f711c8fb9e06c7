"""Commands to single workers, or to all of them."""
