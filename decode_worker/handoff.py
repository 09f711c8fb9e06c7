"""Prompts that run on a prefill worker: reserve blocks, grant them, wait for the KV, admit the sequence.

Handoffs own the KV receiver, the links to the prefill workers, and the request of every lease. Invariant: a lease ends
in exactly one of two events. After Committed its blocks belong to the sequence, which is admitted; after Released they
are freed.
"""

import asyncio
import functools
import time
from collections.abc import Callable

import msgspec
import structlog
from msgspec import structs

from baton_proto.decoding import decoder
from baton_proto.timeline import Timeline, micros
from baton_proto.version import check_major
from baton_proto.worker import MAJOR, Failure, FirstToken, Handoff
from decode_worker.asking import AskingPeers
from decode_worker.prefill_link import PrefillLink
from decode_worker.reservations import Reservations
from engine.interface import Engine
from engine.sequences.output import SequenceOutput, StepOutput
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released, TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from worker.engines.base import SharedKv
from worker.requests.request import Phase, Request
from worker.runtime import WorkerRuntime

log = structlog.get_logger()

_decode_first_token = decoder(FirstToken)


class Handoffs(AskingPeers):
    """Event loop, where nothing else is said."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        kv: SharedKv,
        fail: Callable[[Request, Failure], None],
        on_outputs: Callable[[list[SequenceOutput]], None],
    ) -> None:
        """`fail` ends a request, and calls abandon(). `on_outputs` gets the first token of an admitted sequence."""
        super().__init__(runtime, fail)
        self._on_outputs = on_outputs
        self._engine = kv.engine
        self._repeats_first = kv.repeats_first
        self._eos_token_ids = runtime.assembly.files.eos_token_ids
        config = runtime.config
        identity = runtime.assembly.identity(runtime.worker_id, runtime.incarnation)
        self._other_slabs = kv.other_slabs()
        self._receiver = Receiver(
            kv.slab,
            identity,
            config.transfer,
            config.workers.host,
            self._receiver_event,
            self._other_slabs,
            runtime.keys.cluster,
            config.workers.reached_at,
        )
        self._reservations = Reservations(
            kv.engine,
            self._receiver,
            runtime.assembly.layout.block_size,
            config.transfer.lease_ttl_s,
            functools.partial(self._bridge.from_engine, self._granted),
            runtime.assembly.layout.num_blocks,
        )
        self.endpoint = self._receiver.endpoint
        self._leases: dict[str, Request] = {}  # by transfer id, until Committed or Released

    def start(self, request: Request) -> None:
        assert request.phase is Phase.RESERVING
        self._bridge.post(lambda _: self._reservations.add(request))

    def abandon(self, request: Request, phase: Phase, reason: str) -> None:
        """The blocks are freed when nobody can write them any more."""
        if phase is Phase.RESERVING:
            self._bridge.post(lambda _: self._reservations.cancel(request))
        elif phase is Phase.PREFILLING and request.grant is not None:
            if link := self._open_link(request):
                link.cancel(request)
            self._receiver.cancel(request.grant.transfer_id, reason)
            self._bridge.post(lambda _: self._reservations.retry())

    def step_done(self, output: StepOutput) -> None:
        self._reservations.retry()

    def blocks_freed(self) -> None:
        self._reservations.retry()

    # --- for the worker process ---------------------------------------------------------------------------------------

    def lease_count(self) -> int:
        return self._receiver.lease_count()

    @property
    def problem(self) -> str:
        return self._receiver.problem

    def check_integrity(self) -> list[str]:
        return self._receiver.check_integrity()

    async def suspend(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._receiver.suspend, timeout_s)

    def weights_changed(self) -> None:
        runtime = self._runtime
        self._receiver.identify(runtime.assembly.identity(runtime.worker_id, runtime.incarnation))

    def resume(self) -> None:
        self._receiver.resume()

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._receiver.close)
        for slab in self._other_slabs:
            slab.close()

    # --- from the reservation to the prefill worker -------------------------------------------------------------------

    def _granted(self, request: Request) -> None:
        grant = request.grant
        assert grant is not None
        self._leases[grant.transfer_id] = request
        if request.phase is Phase.ENDED:
            self._receiver.cancel(grant.transfer_id, "the request ended before its prompt was sent")
            return
        self._ask(request, grant)

    # --- bad news -----------------------------------------------------------------------------------------------------

    def _link_lost(self, link: PrefillLink, requests: list[Request], reason: str) -> None:
        # Else each of those that wait for its prefixes would wait for a connection in its turn.
        self._bridge.post(
            lambda _: self._reservations.followers(link.target),
            lambda followers: self._fail_all(followers, reason, link),
        )
        super()._link_lost(link, requests, reason)

    # --- events of the receiver ---------------------------------------------------------------------------------------

    def _receiver_event(self, event: TransferEvent) -> None:
        """A receiver's thread."""
        if not isinstance(event, LayerArrived):
            self._bridge.to_event_loop(self._transfer_event, event)

    def _transfer_event(self, event: TransferEvent) -> None:
        request = self._leases.get(event.transfer_id)
        if request is None:
            log.error("event of an unknown lease", event_kind=type(event).__name__, transfer=event.transfer_id)
            return
        match event:
            case Committed():
                del self._leases[event.transfer_id]
                self._committed(request, event)
            case Failed():
                self._runtime.metrics.transfer_failures += 1
                self._fail_if_alive(request, event.reason)
            case Released():
                del self._leases[event.transfer_id]
                self._fail_if_alive(request, "the lease ended without a commit")
                self._bridge.post(functools.partial(self._release, request))

    def _committed(self, request: Request, event: Committed) -> None:
        if request.phase is Phase.ENDED:  # cancelled while the commit was under way
            self._bridge.post(functools.partial(self._release, request))
            return
        try:
            first: FirstToken = _decode_first_token(event.payload)
            check_major("first token", first.version, MAJOR)
        except msgspec.DecodeError as error:
            self._bridge.post(functools.partial(self._release, request))
            self._fail_if_alive(request, f"unreadable commit: {error}")
            return
        if link := self._open_link(request):
            link.forget(request)
        request.phase = Phase.RUNNING
        request.handoff = Handoff(
            prefill_worker=request.submit.prefill.worker_id if request.submit.prefill else "",
            kv_blocks=event.kv_blocks,
            kv_bytes=event.kv_bytes,
            transport=event.transport,
            prompt_counts=first.prompt_counts,
        )
        request.timeline = _timeline(request, event, first)
        request.prompt_logprobs = first.prompt_logprobs
        self._runtime.metrics.received(event.transport, event.kv_bytes)
        is_told = self._is_plain(request, first.token_id)
        if is_told:  # a client waits for it, and a step may take long
            logprobs = [] if first.logprobs is None else [first.logprobs]
            self._on_outputs([SequenceOutput(request.sequence, [first.token_id], logprobs)])
        self._bridge.post(
            lambda _: self._admit(request, first),
            lambda output: self._on_outputs([output] if output and not is_told else []),
        )

    def _is_plain(self, request: Request, token_id: int) -> bool:
        """Whether the engine will say of the first token no more than that it is there."""
        sequence, sampling = request.sequence, request.submit.sampling
        may_end = token_id in self._eos_token_ids or token_id in sampling.stop_token_ids
        is_last = sequence.num_output_tokens + 1 >= sampling.max_tokens
        return self._repeats_first and sequence.matcher is None and not may_end and not is_last

    def _admit(self, request: Request, first: FirstToken) -> SequenceOutput | None:
        """Engine thread. None: the engine draws the first token itself."""
        output = self._engine.admit(request.sequence, first.token_id, first.logprobs)
        self._reservations.retry()
        return output

    def _release(self, request: Request, _: Engine) -> None:
        """Engine thread."""
        self._engine.release(request.sequence)
        self._reservations.retry()


def _timeline(request: Request, event: Committed, first: FirstToken) -> Timeline:
    """The first token has not left yet."""
    return Timeline(
        first_us=0,
        granted_us=micros(request.granted_s - request.accepted_s),
        arrived_us=micros(time.monotonic() - request.accepted_s),
        prefill_us=first.begun_us + event.sent_us,
        chunks=first.chunks,
        pushes=[structs.replace(push, start_us=first.begun_us + push.start_us) for push in event.pushes],
    )
