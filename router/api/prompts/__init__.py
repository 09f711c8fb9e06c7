"""What an answer says of its prompt: the prompt itself, and log-probabilities of its tokens."""
