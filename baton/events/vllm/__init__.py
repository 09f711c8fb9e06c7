"""What a vLLM engine says of its cache, translated into our events."""
