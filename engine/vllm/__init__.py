"""vLLM as a worker's engine: what worker/ asks of an engine, answered by an AsyncLLM in the same process."""
