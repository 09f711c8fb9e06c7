"""What a worker does with workers of the other role: it ships KV to them, or receives theirs."""

from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Failure
from engine.sequences.output import StepOutput
from worker.requests.request import Phase, Request
from worker.stream_server import Handler


class Peers:
    """A worker without peers; prefill_worker/ and decode_worker/ each override what they need. Event loop, where
    nothing else is said."""

    endpoint: TransferEndpoint | None = None  # of the KV receiver; None: the worker receives no KV
    asks = False  # prompts of requests can run on a peer

    @property
    def num_prompts(self) -> int:
        """Prompts of peers that are in flight here."""
        return 0

    @property
    def problem(self) -> str:
        """Why the worker can serve no more, and so ends; empty when it can."""
        return ""

    def stream_handlers(self) -> dict[str, Handler]:
        """Handlers of the peers' own streams, by what a stream is for."""
        return {}

    # --- requests whose prompts run elsewhere -------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Has the prompt of a request in RESERVING run on a peer. Only a worker that `asks` is told."""
        raise AssertionError("its prompts run here")

    def abandon(self, request: Request, phase: Phase, reason: str) -> None:
        """Stops what was under way at peers for a request that has ended in `phase`."""

    def step_done(self, output: StepOutput) -> None:
        """Engine thread: after each engine step, before the event loop hears of it. It may have freed blocks."""

    def blocks_freed(self) -> None:
        """Engine thread: blocks came free without a step."""

    # --- for the worker process ---------------------------------------------------------------------------------------

    def lease_count(self) -> int:
        return 0

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, one sentence each; empty when all is well."""
        return []

    async def suspend(self, timeout_s: float) -> None:
        """Lets go of all peers while nothing is in flight: until `resume`, no peer writes our KV and none is written
        from it. Raises UnavailableError, and goes on as before, when a peer does not let go in time."""

    def weights_changed(self) -> None:
        """While suspended: from now on peers are told that the worker has other weights."""

    def resume(self) -> None: ...

    def end_all(self, failure: Failure) -> None:
        """Ends every prompt of a peer with this failure."""

    def end_streams(self) -> None:
        """After the drain: ends the peers' streams, so that the server can stop."""

    async def close(self) -> None:
        """Ends connections and transfers, before the engine thread stops."""
