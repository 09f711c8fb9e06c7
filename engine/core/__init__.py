"""Which sequences run in a step, and where their KV blocks are. Torch-free."""
