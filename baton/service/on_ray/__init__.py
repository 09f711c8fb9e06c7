"""The same service on a Ray cluster: Ray places processes and reports their deaths."""
