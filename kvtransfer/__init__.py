"""How KV blocks travel from prefill to decode workers."""
