"""The role that runs prompts and pushes their KV into decode workers."""
