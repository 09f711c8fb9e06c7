"""Who computes a step: plain torch or a mock; what `auto` means."""
