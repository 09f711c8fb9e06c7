"""The gRPC services `baton.v1.Inference` and `baton.v1.Admin`."""
