"""What a worker of either role promises to the process around it."""

from typing import Any, Protocol

from baton_proto.routers.left import LeftAnswer
from baton_proto.worker import Failure
from engine.sequences.output import SequenceOutput, StepOutput
from worker.requests.in_flight import InFlight
from worker.requests.peers import Peers
from worker.step_stream import StepHandler


class Role(StepHandler, Protocol):
    """Event loop, where nothing else is said."""

    name: str  # "prefill" | "decode"
    peers: Peers
    in_flight: InFlight[Any, Any]  # requests, and prompts of peers

    def step_done(self, output: StepOutput) -> None:
        """Engine thread: after each engine step, before the event loop hears of it."""

    def outputs(self, outputs: list[SequenceOutput]) -> None:
        """Takes the new tokens after each engine step."""

    def left_answer(self, asked: LeftAnswer) -> bytes | None:
        """The tokens of an answer that its router or client has left; None: this worker has none of it."""

    def check_integrity(self) -> list[str]:
        """What is wrong outside the engine, one sentence each; empty when all is well."""

    def end_all(self, failure: Failure) -> None:
        """Ends everything in flight with this failure."""
