"""Steps on a GPU: packed inputs, CUDA graphs, attention backends."""
