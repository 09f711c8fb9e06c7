"""Memory below the device, where prefixes go that no longer fit into the KV slab."""
