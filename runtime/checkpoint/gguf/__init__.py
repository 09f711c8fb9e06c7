"""GGUF files, made folders in Hugging Face form."""
