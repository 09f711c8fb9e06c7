"""gRPC options of every connection between two processes of a service: how soon a peer that hangs is noticed.

A process that dies closes its sockets; one that is stopped, or whose machine has vanished, closes nothing, and only
pings tell. Used by both ends of the worker streams.
"""

INTERVAL_MS = 2_000
ANSWER_WITHIN_MS = 3_000

KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", ANSWER_WITHIN_MS),
    ("grpc.http2.ping_timeout_ms", ANSWER_WITHIN_MS),  # the one that counts: it is a minute unless it is set
    ("grpc.http2.max_pings_without_data", 0),
]
"""For the end that dials, and for the end that listens."""

ACCEPT_PINGS: list[tuple[str, int]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
]
"""For the end that listens."""
