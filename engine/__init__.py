"""The inference engine: who runs, where KV blocks are, the model's arithmetic, steps on CPU and GPU."""
