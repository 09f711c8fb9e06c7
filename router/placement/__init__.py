"""Which workers get a request, and why."""
