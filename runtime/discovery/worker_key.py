"""The name of one life of a worker."""

WorkerKey = tuple[str, int]
"""Worker id and incarnation. What a worker has cached ends with its incarnation."""
