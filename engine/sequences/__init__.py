"""Sequences, the batches made of them, and the copies of blocks that they wait for."""
