"""A running `vllm serve` as a worker's engine: what worker/ asks of an engine, answered over HTTP and ZeroMQ."""
