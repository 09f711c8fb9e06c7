"""Throughput and latencies, of a model in this process or of whatever speaks OpenAI's API."""
