"""What is counted per request."""
