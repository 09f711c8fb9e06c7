"""Models that sleep until somebody asks for them."""
