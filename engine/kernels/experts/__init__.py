"""What a layer with experts computes."""
