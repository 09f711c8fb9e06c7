"""A step of our own engine: which sequences run in it, in which order, and the thread that runs it. Torch-free."""
