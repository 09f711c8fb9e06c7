"""`python -m runtime.grammar.helper FOLDER VOCAB_SIZE EOS,EOS,...`: compiles what callers sent, where that may fail.

The process has a socket as its standard input: checks come in, verdicts go out. It reads the vocabulary once and forks
children, each of which works on one check at a time. So a grammar that takes too much memory, stack or time ends its
own child and nothing else. Invariant: this process has one thread, because threads do not survive a fork.
"""

import math
import os
import resource
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import msgpack

from baton_proto.decoding import decoder
from baton_proto.grammar import GrammarCheck, GrammarVerdict
from runtime.errors import ModelError
from runtime.grammar.compiling import compiled
from runtime.grammar.deep_stack import STACK_BYTES, on_deep_stack
from runtime.grammar.framing import received, send
from runtime.grammar.room import heap_bytes
from runtime.grammar.words.vocabulary import Vocabulary
from runtime.processes.die_with_parent import die_with_parent

MAX_CHILDREN: Final = 3
NICE: Final = 5  # requests that are under way go before those whose grammars are checked
CPU_S: Final = 1.0  # of one grammar, rounded up to whole seconds: most take 1 ms, those at the limits 0.3 s
WATCHED_S: Final = 0.02
WALL_S: Final = 30.0  # a child that took so long without using its CPU time is not to blame
MAX_HELD_BYTES: Final = 20 * 1024 * 1024  # of one grammar, compiled: a multiple of 86,400 takes 17
COMPILE_BYTES: Final = 64 * 1024 * 1024  # while it is compiled
SIMPLER = "make it simpler: fewer and shallower parts, smaller bounds of numbers and lengths"

RETIRED_BYTES: Final = 1024 * 1024  # a child that has compiled more makes room for a fresh one
MAX_CHECKS: Final = 500  # of one child

_decode = decoder(GrammarCheck)
_decode_verdict = decoder(GrammarVerdict)


@dataclass(slots=True, eq=False)
class _Child:
    pid: int
    peer: socket.socket
    checks: int = 0  # that it has had
    check_id: int = 0  # that it works on; 0: none
    late_s: float = math.inf  # on time.monotonic()
    limit_bytes: int = 0  # of its memory, for this check
    is_too_large: bool = False


class Helper:
    def __init__(self, peer: socket.socket, vocabulary: Vocabulary | ModelError) -> None:
        self._peer = peer
        self._vocabulary = vocabulary
        self._selector = selectors.DefaultSelector()
        self._selector.register(peer, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}  # by the number of the socket

    def serve(self) -> None:
        """Serves until the peer leaves."""
        while True:
            is_busy = any(child.check_id for child in self._children.values())
            for key, _ in self._selector.select(WATCHED_S if is_busy else None):
                if key.fileobj is not self._peer:
                    self._hear(self._children[key.fd])
                elif self._has_place and not self._take():
                    return
            for child in self._children.values():
                child.is_too_large |= bool(child.check_id) and _memory_bytes(child.pid) > child.limit_bytes
                if child.is_too_large or child.late_s < time.monotonic():
                    os.kill(child.pid, signal.SIGKILL)

    @property
    def _has_place(self) -> bool:
        return len(self._children) < MAX_CHILDREN or any(not child.check_id for child in self._children.values())

    def _take(self) -> bool:
        """Hands the next check to a child. Returns False when the peer has left."""
        body = received(self._peer)
        if body is None:
            return False
        check_id = _decode(body).check_id
        if isinstance(self._vocabulary, ModelError):
            verdict = GrammarVerdict(check_id, problem=f"cannot be followed: {self._vocabulary.problem}")
            send(self._peer, msgpack.encode(verdict))
            return True
        child = next((child for child in self._children.values() if not child.check_id), None)
        child = child or self._fork(self._vocabulary)
        child.check_id, child.late_s = check_id, time.monotonic() + WALL_S
        child.limit_bytes = _memory_bytes(child.pid) + COMPILE_BYTES
        child.checks += 1
        send(child.peer, body)
        self._listen()
        return True

    def _fork(self, vocabulary: Vocabulary) -> _Child:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            for others in (ours, *(child.peer for child in self._children.values())):
                others.close()
            _run_child(vocabulary, theirs)
        theirs.close()
        child = self._children[ours.fileno()] = _Child(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ)
        return child

    def _hear(self, child: _Child) -> None:
        """A child has told its verdict, or has died."""
        body = received(child.peer)
        verdict: GrammarVerdict | None = None if body is None else _decode_verdict(body)
        if verdict is None or verdict.problem or verdict.held_bytes > RETIRED_BYTES or child.checks >= MAX_CHECKS:
            self._selector.unregister(child.peer)
            del self._children[child.peer.fileno()]
            child.peer.close()  # which ends one that lives
            _, status = os.waitpid(child.pid, 0)
            verdict = verdict or _death(child, os.waitstatus_to_exitcode(status))
        send(self._peer, msgpack.encode(verdict))
        child.check_id, child.late_s = 0, math.inf
        self._listen()

    def _listen(self) -> None:
        """Takes no check that would wait here: others wait where they are in turn."""
        is_heard = self._peer in self._selector.get_map()
        if self._has_place and not is_heard:
            self._selector.register(self._peer, selectors.EVENT_READ)
        elif is_heard and not self._has_place:
            self._selector.unregister(self._peer)


def _death(child: _Child, code: int) -> GrammarVerdict:
    """What the end of a child says of its grammar."""
    if code == -signal.SIGXCPU:
        problem = f"takes more than {CPU_S:g} s to compile"
    elif code == -signal.SIGSEGV:
        problem = "is nested too deeply"
    elif code == -signal.SIGKILL and not child.is_too_large:  # it was late, or the machine has no memory left
        return GrammarVerdict(child.check_id, failure="the process that compiled it was killed")
    else:
        problem = f"takes more than {COMPILE_BYTES >> 20} MiB to compile"
    return GrammarVerdict(child.check_id, problem=f"{problem}; {SIMPLER}")


def _run_child(vocabulary: Vocabulary, peer: socket.socket) -> None:
    """Judges until the helper closes the socket. Never returns."""
    try:
        die_with_parent()
        os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdin.fileno())
        os.dup2(sys.stdin.fileno(), sys.stderr.fileno())  # where llguidance tells how it died
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while (body := received(peer)) is not None:
            send(peer, msgpack.encode(_judged_within(vocabulary, _decode(body))))
    finally:
        os._exit(1)  # nothing of the helper's is flushed or closed here


def _judged_within(vocabulary: Vocabulary, check: GrammarCheck) -> GrammarVerdict:
    """Ends this process where a limit is reached."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + CPU_S), most))
    try:
        return on_deep_stack(lambda: _judged(vocabulary, check), STACK_BYTES)
    except MemoryError:
        os._exit(1)
    except BaseException as error:  # also a panic of llguidance: the grammar made it
        return GrammarVerdict(check.check_id, problem=f"cannot be used: {error!r}"[:2000])


def _judged(vocabulary: Vocabulary, check: GrammarCheck) -> GrammarVerdict:
    before = heap_bytes()
    try:
        held = compiled(vocabulary, check.grammar)
    except ValueError as error:
        return GrammarVerdict(check.check_id, problem=str(error)[:2000])
    held_bytes = max(0, heap_bytes() - before)
    del held
    if held_bytes > MAX_HELD_BYTES:
        problem = f"takes {held_bytes >> 20} MiB when compiled; at most {MAX_HELD_BYTES >> 20} are allowed; {SIMPLER}"
        return GrammarVerdict(check.check_id, problem=problem)
    return GrammarVerdict(check.check_id, held_bytes=held_bytes)


def _memory_bytes(pid: int) -> int:
    """Resident; 0 where the system does not tell. No limit of the system's: where memory is refused to a library that
    is about to say what went wrong, it hangs."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to us too; our parent ends us
    os.nice(NICE)
    _, folder, vocab_size, eos_token_ids = sys.argv
    vocabulary: Vocabulary | ModelError
    try:
        vocabulary = Vocabulary(
            Path(folder), int(vocab_size), [int(token) for token in eos_token_ids.split(",") if token]
        )
    except ModelError as error:
        vocabulary = error
    with suppress(ConnectionError):  # our parent has left
        Helper(socket.socket(fileno=sys.stdin.fileno()), vocabulary).serve()


if __name__ == "__main__":
    main()
