"""Whether answers can follow a grammar, asked of a helper process, because native code reads what callers sent there.

Verdicts are kept by the grammars' digests. A helper that dies is started again, and asked again.
"""

import hashlib
import itertools
import os
import socket
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from msgspec import msgpack, structs

from baton_proto.decoding import decoder
from baton_proto.grammar import Grammar, GrammarCheck, GrammarVerdict
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.bounds import check_size
from runtime.grammar.framing import received, send
from runtime.processes.launch import launch_command
from runtime.processes.process import how_it_ended
from runtime.side_lane import SideLane

log = structlog.get_logger()

TIMEOUT_S: Final = 10.0  # to wait for a place and to compile
THREADS: Final = 3  # that wait for verdicts
MAX_WAITING: Final = 256
MAX_VERDICTS: Final = 4096
MAX_ASKED: Final = 3  # times a check is sent to a fresh helper
END_TIMEOUT_S: Final = 5.0
RESTART_S: Final = 1.0  # after a helper that has told nothing
# One thread, because the helper forks; one heap, because its bytes are counted.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_decode = decoder(GrammarVerdict)


@dataclass(slots=True)
class _Asked:
    check: bytes
    verdict: "Future[GrammarVerdict]" = field(default_factory=Future)
    times: int = 0  # that it was sent


class GrammarChecker:
    """Any thread may call."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`folder`: the model's, in Hugging Face form. `vocab_size`: the model's."""
        ends = ",".join(map(str, sorted(eos_token_ids)))
        self._command = [*launch_command("runtime.grammar.helper"), str(folder), str(vocab_size), ends]
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._lane = SideLane(THREADS, MAX_WAITING, "grammars")
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._lock = threading.Lock()  # of what is above and below
        self._sending = threading.Lock()
        self._peer: socket.socket | None = None
        self._closed = threading.Event()
        # Invariant: the helper lives as long as the thread that has started it.
        self._thread = threading.Thread(target=self._keep_helper, name="grammar helper", daemon=True)

    def start(self) -> None:
        """Starts the helper, which reads the vocabulary. A check starts it, too. Idempotent."""
        with self._lock:
            if not self._thread.ident and not self._closed.is_set():
                self._thread.start()

    def close(self) -> None:
        """Ends the helper. Idempotent."""
        self._closed.set()
        with self._lock:
            if self._peer is not None:
                self._peer.shutdown(socket.SHUT_RDWR)
        if self._thread.ident:
            self._thread.join()

    async def check_soon(
        self, grammar: Grammar, name: str, deadline_s: float | None = None, lane: SideLane | None = None
    ) -> Grammar:
        """The grammar with the bytes that it holds when compiled. A check waits in `lane`, or else in our own.
        `deadline_s`: on time.monotonic(). Raises InvalidRequestError, which says what is wrong with the field `name`,
        OverloadedError, UnavailableError and DeadlineError."""
        try:
            check_size(grammar)
        except ValueError as error:
            raise InvalidRequestError(name, str(error)) from None
        digest = hashlib.blake2b(msgpack.encode(grammar), digest_size=16).digest()
        verdict = self._verdicts.get(digest)
        if verdict is None:
            lane = lane or self._lane
            verdict = await lane.run_within(TIMEOUT_S, deadline_s, "a grammar was not checked", self.verdict, grammar)
            self._verdicts[digest] = verdict
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if verdict.problem:
            raise InvalidRequestError(name, verdict.problem)
        return structs.replace(grammar, held_bytes=verdict.held_bytes)

    def verdict(self, grammar: Grammar) -> GrammarVerdict:
        """Waits for it. Raises UnavailableError, which says nothing of the grammar."""
        check_id = next(self._ids)
        asked = _Asked(msgpack.encode(GrammarCheck(check_id, grammar)))
        self.start()
        with self._lock:
            if self._closed.is_set():
                raise UnavailableError("grammars are checked no more: the process ends")
            self._asked[check_id] = asked
            peer = self._peer
        if peer is not None:
            self._send(peer, [asked])
        verdict = asked.verdict.result()
        if verdict.failure:
            raise UnavailableError(f"a grammar was not checked: {verdict.failure}; try again")
        return verdict

    # --- the helper's thread ------------------------------------------------------------------------------------------

    def _keep_helper(self) -> None:
        while not self._closed.is_set():
            ours, theirs = socket.socketpair()
            with ours, theirs:
                process = subprocess.Popen(
                    self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=os.environ | _ENVIRONMENT
                )
                theirs.close()
                told = self._serve(ours)
            self._end(process, told)
        with self._lock:
            self._give_up(list(self._asked), "the process ends")

    def _serve(self, peer: socket.socket) -> int:
        """Takes verdicts until the helper has died or we close. Returns how many there were."""
        with self._lock:
            self._peer = None if self._closed.is_set() else peer
            waiting = list(self._asked.values())
        told = 0
        if self._peer is not None and self._send(peer, waiting):
            while (body := received(peer)) is not None:
                verdict: GrammarVerdict = _decode(body)
                told += 1
                with self._lock:
                    asked = self._asked.pop(verdict.check_id, None)
                if asked is not None:
                    asked.verdict.set_result(verdict)
        with self._lock:
            self._peer = None
        return told

    def _send(self, peer: socket.socket, asked: list[_Asked]) -> bool:
        """Returns False when the helper has died; its end asks again."""
        try:
            with self._sending:
                for one in asked:
                    one.times += 1
                    send(peer, one.check)
        except OSError:
            return False
        return True

    def _end(self, process: "subprocess.Popen[bytes]", told: int) -> None:
        try:
            code = process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if self._closed.is_set():
            return
        log.warning("the helper that compiles grammars is started again", pid=process.pid, ended=how_it_ended(code))
        with self._lock:
            tired = [check_id for check_id, asked in self._asked.items() if asked.times >= MAX_ASKED]
            self._give_up(tired, f"its helper process {how_it_ended(code)}")
        if not told:
            self._closed.wait(RESTART_S)

    def _give_up(self, check_ids: list[int], why: str) -> None:
        for check_id in check_ids:
            self._asked.pop(check_id).verdict.set_result(GrammarVerdict(check_id, failure=why))
