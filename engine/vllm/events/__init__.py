"""What a vLLM engine says of its cache: its messages, their order, and its blocks under Baton's names."""
