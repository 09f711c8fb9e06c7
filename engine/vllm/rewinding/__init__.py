"""Seeded requests on CPUs: vLLM takes back what it drew for a token that nobody gets."""
