"""How one life of a worker is named."""

WorkerKey = tuple[str, int]
"""Worker id and incarnation: what a worker had cached ends with its incarnation."""
