"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`: what a model gives of prompts besides text."""
