"""What worker/ and the two roles ask of an engine, whichever it is: ours, a mock, vLLM, or somebody's server.

worker/engines/table.py has a row for each engine, tests/engine/contract.py what each of them has to pass. An engine
belongs to its Loop: unless said otherwise everything here is called where the loop steps it, between two steps.
"""

import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence as Run
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from msgspec import Struct

from baton_proto.discovery import Pace, WorkerLoad
from baton_proto.kv_events import KvEvent, Stored
from baton_proto.sampling import TokenLogprobs
from engine.sequences.batch import Batch, LayerDone
from engine.sequences.output import SequenceOutput
from engine.sequences.sequence import Sequence
from runtime.config.planner import TargetsConfig

if TYPE_CHECKING:  # an engine without weights of its own needs no torch
    from engine.model.checkpoint import Checkpoint

T = TypeVar("T")

LEVELS: Final = (1, 2)  # of sleep, as vLLM has them: 1 keeps the weights in host memory, 2 drops them
LOOK_AHEAD: Final = 8  # waiting sequences that may slip in before one that does not fit


class Counts(Struct, frozen=True):
    """Sums since the engine's start; an engine leaves out what it does not have."""

    prompt_tokens: int = 0  # computed
    preemptions: int = 0
    blocks_kept: int = 0  # now, because requests asked for it
    blocks_restored: int = 0  # copied back from the host tier
    blocks_lowered: int = 0  # copied to the host tier
    blocks_read: int = 0  # from the disk tier
    disk_errors: int = 0
    prefix_collisions: int = 0
    drafted_tokens: int = 0  # guessed before they were computed
    accepted_tokens: int = 0  # of these, guessed right


class Engine(Protocol):
    def add(self, sequence: Sequence) -> None:
        """Takes a sequence, whose news come with the steps. Raises InvalidRequestError when its id is in use."""

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a sequence without an output, and returns it; None when there is none."""

    def load(self) -> WorkerLoad:
        """All but the leases and the last event id, which the worker fills in."""

    def pace(self) -> Pace:
        """How fast the engine works, with the steps timed since the last call."""

    def counts(self) -> Counts:
        """Any thread."""

    def snapshot(self) -> tuple[list[KvEvent], list[Stored]]:
        """The events that no step has told yet, and the whole prefix cache with these; parents before children."""

    def forget_cache(self, *, keep: bool) -> list[KvEvent]:
        """Empties the device's prefix cache before the memory goes; `keep`: what fits goes to a lower tier. Returns the
        events. Raises UnavailableError while a sequence has blocks."""

    def aim(self, targets: TargetsConfig) -> None:
        """Steps last by these targets from now on, where the engine has a say in it."""

    def flush(self) -> bool:
        """Before the end: writes cached prefixes to where the next start finds them. Whether some are being written."""

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in sentences; empty when all is well."""


class KvEngine(Engine, Protocol):
    """An engine whose workers send each other KV."""

    on_batch: Callable[[Batch], LayerDone | None] | None
    """Called right before a batch runs; the result is called after each of the batch's layers."""

    def unpin(self, sequence: Sequence) -> None:
        """Frees the blocks of a pinned sequence that has ended. Invariant: nobody reads them any more."""

    def reserve(self, sequence: Sequence) -> bool:
        """Takes blocks for a sequence whose prompt another worker computes. False while they do not fit: the sequence
        keeps its turn, and the caller asks again. Raises InvalidRequestError when they never fit."""

    def follows(self, sequence: Sequence, leaders: Run[Sequence]) -> bool:
        """Whether a sequence had better wait until one of `leaders` has brought the prefix that both have in common."""

    def restores(self, sequence: Sequence) -> bool:
        """Whether a sequence that could not be reserved waits for its own blocks alone, so that others may pass."""

    def forgo(self, sequence: Sequence) -> None:
        """Nobody asks again for a sequence that could not be reserved."""

    def admit(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput | None:
        """The KV of a reserved sequence has arrived with its first token, which the result reports; None: the engine
        draws the first token itself."""

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a reserved sequence that is not admitted. Invariant: nobody writes them any more."""


class Adapters(Protocol):
    """The LoRA adapters of an engine's model, which come and go while it runs. Event loop."""

    @property
    def names(self) -> Run[str]: ...  # of those that requests may name

    @property
    def places(self) -> int: ...  # adapters that take part in one step; 0: nobody knows

    def folder(self, name: str) -> str:
        """That one of `names` was loaded from; empty: nobody knows."""

    async def load(self, name: str, folder: str) -> None:
        """Returns when requests may name it. Raises UnavailableError or ModelError, with nothing changed."""

    async def unload(self, name: str) -> None:
        """No new request may name it. Raises UnavailableError."""


class Loop(Protocol):
    """What steps an engine and runs calls between the steps."""

    ended: "concurrent.futures.Future[None]"  # with an exception if a fault ended the loop
    on_event_loop: bool  # else on a thread of its own

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None:
        """Idempotent. From another thread than the loop's. Raises DeadlineError or TimeoutError."""

    def call(self, function: Callable[[Engine], T]) -> "concurrent.futures.Future[T]":
        """Any thread: runs the function between steps, in the order of the calls. The future holds its result, or
        UnavailableError when the loop ended first."""


class Memory(Protocol):
    """The memory that an engine gives back when it sleeps. Nothing runs meanwhile."""

    @property
    def asleep(self) -> tuple[str, ...]: ...  # tags, of baton_proto.worker.TAGS

    @property
    def fingerprint(self) -> str: ...  # of the weights

    @property
    def problem(self) -> str: ...  # why nothing may be computed; empty when it may

    def sleep(self, level: int) -> int | Awaitable[int]:
        """Returns the bytes that came free. Raises UnavailableError or RuntimeError, with nothing changed."""

    def wake(self, tags: tuple[str, ...]) -> Awaitable[None] | None:
        """Raises UnavailableError, ModelError or RuntimeError: the part sleeps on."""

    def opened(self, folder: Path) -> "Checkpoint":
        """Any thread: a checkpoint that `read` can take. Raises ModelError, which names what does not fit."""

    def read(self, checkpoint: "Checkpoint") -> None:
        """Replaces the weights' values. Raises ModelError; then `problem` stands until it succeeds."""
