"""The front door: requests in, workers chosen, text out."""
