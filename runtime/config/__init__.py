"""serving.yaml, parsed and checked."""
