"""What a worker has in flight, and what it does with workers of the other role."""
