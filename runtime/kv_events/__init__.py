"""The KV event stream: published, followed, read back."""
