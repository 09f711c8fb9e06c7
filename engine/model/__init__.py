"""A model's arithmetic and its weights."""
