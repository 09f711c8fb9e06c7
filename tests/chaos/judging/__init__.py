"""What the outcome of a round is worth."""
