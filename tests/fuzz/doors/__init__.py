"""Hostile clients of the router's HTTP and gRPC servers, which run in a process of their own."""
