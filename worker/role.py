"""What a prefill worker and a decode worker each promise to the process around them."""

from typing import Any, Protocol

from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Failure
from engine.sequences.output import SequenceOutput, StepOutput
from worker.in_flight import InFlight
from worker.step_stream import StepHandler
from worker.stream_server import Handler


class Role(Protocol):
    """Event loop, where nothing else is said."""

    name: str  # "prefill" | "decode"

    @property
    def endpoint(self) -> TransferEndpoint | None:
        """The endpoint of the KV receiver; None: the role receives no KV."""
        ...

    @property
    def steps(self) -> StepHandler: ...

    @property
    def in_flight(self) -> InFlight[Any, Any]: ...

    def stream_handlers(self) -> dict[str, Handler]:
        """Handlers of the role's own streams, by what a stream is for."""
        ...

    def step_done(self, output: StepOutput) -> None:
        """Engine thread: after each engine step, before the event loop hears of it."""
        ...

    def outputs(self, outputs: list[SequenceOutput]) -> None:
        """Takes the new tokens after each engine step."""
        ...

    def lease_count(self) -> int: ...

    @property
    def problem(self) -> str:
        """Why the worker can serve no more, and so ends; empty when it can."""
        ...

    def check_integrity(self) -> list[str]:
        """What is wrong outside the engine, one sentence each; empty when all is well."""
        ...

    async def suspend(self, timeout_s: float) -> None:
        """Lets go of all peers while nothing is in flight: until `resume`, no peer writes our KV and none is written
        from it. Raises UnavailableError, and goes on as before, when a peer does not let go in time."""
        ...

    def weights_changed(self) -> None:
        """While suspended: from now on peers are told that the worker has other weights."""
        ...

    def resume(self) -> None: ...

    def end_all(self, failure: Failure) -> None:
        """Ends every request in flight with this failure."""
        ...

    def end_streams(self) -> None:
        """After the drain: ends the role's own streams, so that the server can stop."""
        ...

    async def close(self) -> None:
        """Ends connections and transfers, before the engine thread stops."""
        ...
