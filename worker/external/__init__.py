"""A worker whose engine is a vLLM server that somebody else starts, ends and starts again."""
