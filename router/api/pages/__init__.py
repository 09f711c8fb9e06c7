"""What the HTTP API answers besides text: tokens of a prompt, text of tokens, a description of itself."""
