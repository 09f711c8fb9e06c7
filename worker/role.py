"""What a kind of worker promises to the process around it: prefill_worker/ and decode_worker/ each have one."""

from typing import Any, Protocol

from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Failure
from engine.core.engine import SequenceOutput, StepOutput
from worker.in_flight import InFlight
from worker.step_stream import StepHandler
from worker.stream_server import Handler


class Role(Protocol):
    """Event loop, where nothing else is said."""

    name: str  # "prefill" | "decode"

    @property
    def endpoint(self) -> TransferEndpoint | None:
        """Of the KV receiver."""
        ...

    @property
    def steps(self) -> StepHandler: ...

    @property
    def in_flight(self) -> InFlight[Any, Any]: ...

    def stream_handlers(self) -> dict[str, Handler]:
        """Of its own streams, by what they are for."""
        ...

    def step_done(self, output: StepOutput) -> None:
        """Engine thread: after each engine step, before the event loop hears of it."""
        ...

    def outputs(self, outputs: list[SequenceOutput]) -> None:
        """New tokens, after each engine step."""
        ...

    def lease_count(self) -> int: ...

    def check_integrity(self) -> list[str]:
        """What is wrong outside the engine."""
        ...

    async def suspend(self, timeout_s: float) -> None:
        """Nothing is in flight: lets go of all peers, who may neither write our KV nor be written from it until
        `resume`. Raises UnavailableError, and goes on as before, when one of them does not let go in time."""
        ...

    def resume(self) -> None: ...

    def end_all(self, failure: Failure) -> None:
        """Ends what is in flight."""
        ...

    def end_streams(self) -> None:
        """After the drain: ends its own streams, so that the server can stop."""
        ...

    async def close(self) -> None:
        """Before the engine thread stops: ends connections and transfers."""
        ...
