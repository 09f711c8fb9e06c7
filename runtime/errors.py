"""The error tree. Every error carries fields and composes its sentence from them.

BatonError
├── InvalidRequestError     the caller's input; names the field and the limit
│   ├── UnknownModelError
│   │   └── UnservedTaskError    the model does something else
│   ├── UnknownFieldError     says which known one is like it
│   ├── ContextLengthError    longer than the model or any worker's pool takes
│   └── BodyTooLargeError
├── ConfigError             serving.yaml, a flag or a model folder
├── UnauthorizedError       a key or a login is missing, or is not the right one
├── OverloadedError         bounded queue is full; says when to try again
│   ├── RateLimitError        the caller's key has used up its requests or tokens per minute
│   └── TooLateError          the first token would come after the request's deadline
├── UnavailableError        no worker that can serve
│   └── AsleepError           its workers sleep and do not wake; says when to try again
├── DeadlineError           a hop or the whole request ran out of time
├── WorkerLostError         a worker died or refused in mid-request; the router replays elsewhere
├── TransferError           KV hand-over failed
│   └── HandshakeError      the peers' slabs do not fit together
├── RankLostError           a process of a tensor-parallel worker died, hangs or fell out of step; the worker ends
├── ProtocolError           a peer sent something that its contract does not allow
└── ModelError              weights, tokenizer or configuration of a model cannot be used
"""

import difflib
import re
from collections.abc import Iterable
from typing import Any

SHOWN_CHARS = 100  # of a word in a refusal, which may repeat a number of any length
NO_FILES = "the router may have no more open files (ulimit -n); try again later"
LIKENESS = 0.75  # of a known name, to be taken for what an unknown one was meant to be: 1 is equal
MATCHED_CHARS = 40  # of an unknown name: looking for its neighbour takes the longer the longer it is
_LONG_WORD = re.compile(rf"\b(\w{{{SHOWN_CHARS}}})\w+")


def shown(value: object) -> str:
    """What a refusal repeats of a caller's value, whatever its length."""
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]!r}..."
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def nearest(name: str, known: Iterable[str], kind: str = "field", prefix: str = "") -> str:
    """What the refusal of an unknown name adds: the known one that is like it, behind `prefix`, or else nothing."""
    near = difflib.get_close_matches(name[:MATCHED_CHARS], known, n=1, cutoff=LIKENESS)
    return f"; the nearest known {kind} is {prefix + near[0]!r}" if near else ""


def drop_frames(error: BaseException) -> None:
    """Drops the frames that `error`, and the errors behind it, came through. They hold what a request has sent, and
    often, in a future or a task, the error itself; then all of it would stay until the garbage collector comes."""
    behind: BaseException | None = error
    while behind is not None:
        error, behind = behind, behind.__cause__ or behind.__context__
        error.__traceback__ = error.__cause__ = error.__context__ = None


class BatonError(Exception):
    """Base of every error that Baton raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets errors travel between Ray's actors with their fields; the constructor is not called again."""
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[BatonError], arguments: tuple[Any, ...]) -> BatonError:
    error = kind.__new__(kind)
    error.args = arguments
    return error


class InvalidRequestError(BatonError):
    """The caller's input is refused. `field`: its name as the caller wrote it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = _LONG_WORD.sub(r"\1...", problem)
        super().__init__(f"{field}: {self.problem}")


class UnknownFieldError(InvalidRequestError):
    """`field`: with its path. `near`: what to add of the known one that is like it, if any."""

    def __init__(self, field: str, near: str) -> None:
        self.near = near
        super().__init__(field, f"is not known here{near or '; leave it out'}")


class UnknownModelError(InvalidRequestError):
    def __init__(self, model: str, known: list[str]) -> None:
        self.model = model
        super().__init__("model", f"{shown(model)} is not served here; served: {', '.join(known) or 'none yet'}")


class UnservedTaskError(UnknownModelError):
    """`served`: the tasks of the model."""

    def __init__(self, model: str, task: str, served: Iterable[str]) -> None:
        self.model = model
        self.task = task
        InvalidRequestError.__init__(
            self, "model", f"{shown(model)} does not {task} here; what it does: {', '.join(sorted(served))}"
        )


class ContextLengthError(InvalidRequestError):
    """The request is longer than the model, or than any worker's KV pool."""


class BodyTooLargeError(InvalidRequestError):
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__("body", f"is larger than {limit_bytes} bytes")


class ConfigError(BatonError):
    """A configuration that cannot be used. `where`: a key path, a flag or a file."""

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        self.problem = problem
        super().__init__(f"{where}: {problem}")


class UnauthorizedError(BatonError):
    """`where` refuses us. `remedy`: what to do, in words."""

    def __init__(self, where: str, remedy: str) -> None:
        self.where = where
        self.remedy = remedy
        super().__init__(f"{where} refuses us: {remedy}")


class OverloadedError(BatonError):
    def __init__(self, queue: str, limit: int, retry_after_s: float) -> None:
        self.queue = queue
        self.limit = limit
        self.retry_after_s = retry_after_s
        super().__init__(f"the {queue} holds its limit of {limit} requests; try again in {retry_after_s:.1f} s")


class RateLimitError(OverloadedError):
    """`unit`: what the limit counts, requests or tokens."""

    def __init__(self, unit: str, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{unit} per minute", limit, retry_after_s)
        self.unit = unit
        self.args = (f"this key's limit of {limit} {unit} per minute is reached; try again in {retry_after_s:.1f} s",)


class TooLateError(OverloadedError):
    """A request is refused at once instead of running out of time. It may come again after the time that it would have
    waited, when the work before it is done."""

    def __init__(self, expected_s: float, due_s: float) -> None:
        super().__init__("queue", 0, expected_s)
        self.expected_s = expected_s
        self.due_s = due_s
        expected = f"the first token is expected in {expected_s:.2g} s, and is due in {max(0.0, due_s):.2g} s"
        self.args = (f"{expected}; try again in {self.retry_after_s:.2g} s",)


class UnavailableError(BatonError):
    """No worker that could serve is alive or ready. `reason`: a sentence for the caller."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RouterLeavesError(UnavailableError):
    """The router ends before the answer, which the next router goes on with."""


class AsleepError(UnavailableError):
    def __init__(self, reason: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{reason}; try again in {retry_after_s:.1f} s")


class DeadlineError(BatonError):
    def __init__(self, what: str, timeout_s: float) -> None:
        self.what = what
        self.timeout_s = timeout_s
        within = f"did not finish within {timeout_s:{'.1f' if timeout_s >= 0.1 else '.2g'}} s"
        super().__init__(f"{what} {within if timeout_s > 0 else 'was late before it began'}")


class WorkerLostError(BatonError):
    """The worker died, drained or refused. What it has streamed so far stays valid. `died`: it is this worker, of this
    incarnation, that ended while it had the request."""

    def __init__(self, worker_id: str, reason: str, died: tuple[str, int] | None = None) -> None:
        self.worker_id = worker_id
        self.reason = reason
        self.died = died
        super().__init__(f"worker {worker_id}: {reason}")


class RankLostError(BatonError):
    """A rank of a worker is lost. Because every step needs all ranks, the worker ends."""

    def __init__(self, rank: int, pid: int, problem: str) -> None:
        self.rank = rank
        self.pid = pid
        self.problem = problem
        super().__init__(f"tensor-parallel rank {rank} (pid {pid}) {problem}")


class TransferError(BatonError):
    def __init__(self, transfer_id: str, reason: str) -> None:
        self.transfer_id = transfer_id
        self.reason = reason
        super().__init__(f"KV transfer {transfer_id}: {reason}")


class HandshakeError(TransferError):
    def __init__(self, field: str, ours: object, theirs: object) -> None:
        self.field = field
        self.ours = ours
        self.theirs = theirs
        super().__init__("handshake", f"{field} differs: ours {ours!r}, theirs {theirs!r}")


class ProtocolError(BatonError):
    """`peer`: who sent the message. `problem`: what is wrong with it."""

    def __init__(self, peer: str, problem: str) -> None:
        self.peer = peer
        self.problem = problem
        super().__init__(f"{peer}: {problem}")


class ModelError(BatonError):
    def __init__(self, model: str, problem: str) -> None:
        self.model = model
        self.problem = problem
        super().__init__(f"model {model}: {problem}")
