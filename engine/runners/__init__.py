"""What computes a step: plain torch or a mock, and the meaning of `auto`; the times of its steps."""
