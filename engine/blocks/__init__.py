"""KV blocks: who holds them, which prefixes they keep, and what is copied between the tiers."""
