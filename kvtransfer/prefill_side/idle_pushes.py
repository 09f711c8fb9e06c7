"""Pushes of a rank whose KV heads a lower rank sends: nothing is written, and no connection is made.

They end as other pushes do, well with their commit and badly with an abort, so all ranks are driven alike.
"""

import threading
from collections.abc import Callable

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import LayerBlocks, Push, PushResult


class IdlePushes:
    """Implements `kvtransfer.prefill_side.push.PushQueue`. The thread that commits or aborts calls `on_done`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Push] = set()

    def add(self, grant: Grant, on_done: Callable[[PushResult], None]) -> Push:
        push = Push(self, grant, on_done)
        with self._lock:
            self._open.add(push)
        return push

    def enqueue(self, push: Push, operation: LayerBlocks | wire.Commit) -> None:
        if isinstance(operation, wire.Commit):
            self._finish(push, ok=True, reason="")

    def abort(self, push: Push, reason: str) -> None:
        self._finish(push, ok=False, reason=reason)

    def close(self, reason: str) -> None:
        for push in list(self._open):
            self.abort(push, reason)

    def _finish(self, push: Push, *, ok: bool, reason: str) -> None:
        with self._lock:
            if push not in self._open:
                return
            self._open.remove(push)
        push.end("", ok=ok, reason=reason)
