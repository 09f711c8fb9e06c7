"""All protocols together: the HTTP application and the gRPC server."""
