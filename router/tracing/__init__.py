"""Requests as OpenTelemetry traces; the official SDK is imported only when they are asked for."""
