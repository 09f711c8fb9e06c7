"""Does disaggregation pay? Layouts of the same GPUs compared on the same requests."""
