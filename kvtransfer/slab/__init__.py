"""Where a KV block lies."""
