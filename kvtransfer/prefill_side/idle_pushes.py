"""Pushes of a rank whose KV heads a lower rank sends: nothing to write, nobody to connect to. Owned by the sender.

They end as the others do, so whoever drives the ranks treats them alike: well with their commit, badly with an abort.
"""

import threading
import time
from collections.abc import Callable

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import LayerBlocks, Push, PushResult, PushState


class IdlePushes:
    """Implements `kvtransfer.prefill_side.push.PushQueue`. `on_done` is called by the thread that commits or aborts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[PushState] = set()

    def add(self, grant: Grant, on_done: Callable[[PushResult], None]) -> Push:
        now_s = time.monotonic()
        state = PushState(grant, on_done, started_s=now_s, deadline_s=now_s + grant.ttl_s)
        with self._lock:
            self._open.add(state)
        return Push(self, state)

    def enqueue(self, state: PushState, operation: LayerBlocks | wire.Commit) -> None:
        if isinstance(operation, wire.Commit):
            self._finish(state, ok=True, reason="")

    def abort(self, state: PushState, reason: str) -> None:
        self._finish(state, ok=False, reason=reason)

    def close(self, reason: str) -> None:
        for state in list(self._open):
            self.abort(state, reason)

    def _finish(self, state: PushState, *, ok: bool, reason: str) -> None:
        with self._lock:
            if state not in self._open:
                return
            self._open.remove(state)
        kv_blocks = len(state.grant.block_ids) if ok else 0
        state.on_done(PushResult(ok, reason, "", kv_blocks, 0, time.monotonic() - state.started_s))
