"""The stream behind a NATS key-value bucket, as NATS' key-value clients expect it."""

from typing import Any

from runtime.nats.library import DiscardPolicy, StreamConfig


def bucket_config(stream: str, keys: str, **settings: Any) -> StreamConfig:
    """`keys`: the subject pattern of all keys. `settings`: of this bucket's own."""
    return StreamConfig(
        name=stream,
        subjects=[keys],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
        allow_direct=True,
        deny_delete=True,
        **settings,
    )
