"""The role that runs prompts of decode workers and pushes their KV to them."""
