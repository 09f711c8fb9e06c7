"""Prompts that another server has computed: what its connector says of the KV goes to our server with the same prompt.

The servers move the KV between themselves. Blocks that nobody fetches are freed by the server that holds them, when the
time is over that its connector gives them.
"""

import time

from baton_proto.timeline import Timeline, micros
from baton_proto.worker import Handoff, PrefillPassed
from decode_worker.asking import AskingPeers
from worker.requests.request import Phase, Request

TRANSPORT = "passed"  # as `explain` names it: by the servers' own connector


class PassedPrompts(AskingPeers):
    """Event loop only."""

    def start(self, request: Request) -> None:
        self._ask(request, None)

    def abandon(self, request: Request, phase: Phase, reason: str) -> None:
        if phase is Phase.PREFILLING and (link := self._open_link(request)):
            link.cancel(request)

    def _passed(self, request: Request, passed: PrefillPassed) -> None:
        if request.phase is Phase.ENDED:
            return
        assert request.submit.prefill is not None
        request.phase, request.sequence.transfer = Phase.RUNNING, passed.transfer
        request.handoff = Handoff(request.submit.prefill.worker_id, 0, 0, TRANSPORT, passed.prompt_counts)
        request.timeline = Timeline(
            first_us=0,
            granted_us=micros(request.granted_s - request.accepted_s),
            arrived_us=micros(time.monotonic() - request.accepted_s),
            prefill_us=passed.took_us,
            chunks=passed.chunks,
        )
        self._bridge.post(lambda engine: engine.add(request.sequence))
