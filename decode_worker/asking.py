"""What a decode worker has to do with prefill workers, however their KV comes: it asks them for prompts, and hears of
those that fail."""

import time
from collections.abc import Callable
from typing import Any, Final

from baton_proto.decoding import MAX_TEXT
from baton_proto.worker import Failure, Grant, PrefillPassed, PrefillRequest, PrefillTarget, PromptJob
from decode_worker.prefill_link import PrefillLink
from worker.requests.peers import Peers
from worker.requests.request import Phase, Request
from worker.runtime import WorkerRuntime
from worker.stamps import due_in_ms

LOST: Final = "prefill_lost"  # it may have died of the prompt
FAILED: Final = "prefill_failed"  # it lives, or never had the prompt
CLOCK_S: Final = 0.001  # how much too early the timers of an event loop may ring


class AskingPeers(Peers):
    """Event loop only."""

    asks = True

    def __init__(self, runtime: WorkerRuntime, fail: Callable[[Request, Failure], None]) -> None:
        """`fail` ends a request, and calls abandon()."""
        self._runtime = runtime
        self._bridge = runtime.bridge
        self._fail = fail
        self._links: dict[PrefillTarget, PrefillLink] = {}

    async def close(self) -> None:
        for link in list(self._links.values()):
            await link.close()

    def _ask(self, request: Request, grant: Grant | None) -> None:
        submit = request.submit
        request.phase, request.granted_s = Phase.PREFILLING, time.monotonic()
        job: dict[str, Any] = {name: getattr(submit, name) for name in PromptJob.__struct_fields__} | {
            "request_id": request.key,
            "timeout_s": max(0.0, request.deadline_s - time.monotonic()),
            "due_ms": due_in_ms(request.sequence.due_s),
        }
        command = PrefillRequest(**job, grant=grant)
        link = self._open_link(request) or self._new_link(request)
        link.send(request, command)

    def _open_link(self, request: Request) -> PrefillLink | None:
        assert request.submit.prefill is not None
        return self._links.get(request.submit.prefill)

    def _new_link(self, request: Request) -> PrefillLink:
        target = request.submit.prefill
        assert target is not None
        runtime = self._runtime
        heard = (self._prefill_failed, self._passed, self._link_lost)
        timeout_s = runtime.config.transfer.connect_timeout_s
        link = PrefillLink(target, runtime.worker_id, timeout_s, runtime.keys.cluster, *heard)
        self._links[target] = link
        return link

    def _passed(self, request: Request, passed: PrefillPassed) -> None:
        problem = "it ships no KV, and this worker's engine takes none in another way"
        self._fail_if_alive(request, problem, FAILED)

    def _prefill_failed(self, request: Request, failure: Failure) -> None:
        self._fail_if_alive(request, failure.message, FAILED)

    def _link_lost(self, link: PrefillLink, requests: list[Request], reason: str) -> None:
        if self._links.get(link.target) is link:
            del self._links[link.target]
        self._fail_all(requests, reason, link)

    def _fail_all(self, requests: list[Request], reason: str, link: PrefillLink) -> None:
        for request in requests:
            self._fail_if_alive(request, reason, LOST if link.is_reached else FAILED)

    def _fail_if_alive(self, request: Request, reason: str, code: str = LOST) -> None:
        """Retryable whatever the reason, because another prefill worker may do better. But when the time is over, that
        is the reason: the prefill worker's clock may ring before ours, and nobody shall blame it."""
        if request.phase is not Phase.ENDED:
            is_late = time.monotonic() + CLOCK_S >= request.deadline_s
            self._fail(request, request.late if is_late else _prefill_failure(request, reason, code))


def _prefill_failure(request: Request, reason: str, code: str) -> Failure:
    assert request.submit.prefill is not None
    worker_id = request.submit.prefill.worker_id
    message = f"prefill worker {worker_id}: {reason}"[:MAX_TEXT]
    return Failure(code, message, retryable=True, worker_id=worker_id)
