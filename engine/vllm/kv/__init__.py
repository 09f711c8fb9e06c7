"""vLLM's KV blocks on their way between workers: a connector in vLLM's processes, and its other end in the worker's."""
