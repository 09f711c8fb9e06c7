"""What the dialects of HTTP share: reading a body, and answering with a text or a stream of events."""
