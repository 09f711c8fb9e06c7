"""What operators change of a worker that runs."""
