"""A request on its way through a decode worker.

    submit --(no prefill worker)-----------------------------> RUNNING -> ENDED
           --(prefill worker)--> RESERVING --> PREFILLING ---> RUNNING -> ENDED

Any phase may go to ENDED early: cancelled, out of time, or the prefill worker lost. In ENDED the router knows the end;
blocks of a request that ended in PREFILLING are freed when its lease says that no peer writes them any more (see
handoff.py).
"""

import asyncio
import enum
import time
from dataclasses import dataclass, field

from baton_proto.sampling import PromptLogprobs
from baton_proto.timeline import Timeline
from baton_proto.worker import Failure, Grant, Handoff, Submit
from engine.sequences.sequence import Sequence, SequenceStatus
from worker.step_stream import RouterStream


class Phase(enum.Enum):
    RESERVING = "reserving"  # waits for blocks
    PREFILLING = "prefilling"  # a prefill worker runs the prompt and writes into our blocks
    RUNNING = "running"  # with the engine: local prefill or decode
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Request:
    """The event loop owns a request; the engine thread owns `sequence`, sets `grant` and reads the rest."""

    router: RouterStream
    submit: Submit
    sequence: Sequence  # its request_id is unique in this process, though routers replay requests
    deadline_s: float  # on time.monotonic()
    phase: Phase
    timer: asyncio.TimerHandle | None = None
    grant: Grant | None = None  # from PREFILLING on
    handoff: Handoff | None = None  # what a prefill worker shipped
    started: bool = False  # the router has the first token
    accepted_s: float = field(default_factory=time.monotonic)
    granted_s: float = 0.0  # when it had its blocks
    prompt_logprobs: PromptLogprobs | None = None  # what the prefill worker computed, until the router has it
    timeline: Timeline | None = None  # of its KV, without the first token's time; None: the prompt runs here

    @property
    def name(self) -> tuple[RouterStream, str]:
        """The router's name for the request."""
        return (self.router, self.submit.request_id)

    @property
    def late(self) -> Failure:
        """The failure of a request that is out of time."""
        return Failure("deadline", f"not finished within {self.submit.timeout_s:.1f} s", retryable=False)

    @property
    def is_arriving(self) -> bool:
        """Whether the KV of a request with a lease is still expected."""
        return self.phase is not Phase.ENDED and self.sequence.status is SequenceStatus.REMOTE

    @property
    def key(self) -> str:
        """The engine's and the prefill worker's name for the request."""
        return self.sequence.request_id
