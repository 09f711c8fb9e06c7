"""Tests against a real vLLM engine, in an environment of its own (`make vllm-env`, `make test-vllm`)."""
