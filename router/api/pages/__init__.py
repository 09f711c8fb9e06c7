"""Pages of the HTTP API besides text: the model and its health, tokens of a prompt, text of tokens, OpenAPI."""
