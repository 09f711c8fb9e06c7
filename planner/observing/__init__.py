"""What routers, workers and discovery say, as one observation."""
