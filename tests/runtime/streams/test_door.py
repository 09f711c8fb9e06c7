"""Newcomers at a real port: who talks in time comes in, whatever the others do or do not."""

import queue
import resource
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from runtime.errors import ProtocolError
from runtime.streams.door import MAX_NEWCOMERS, Door, Talk, in_time, received, sent

LIMIT_S = 60.0


class Inn:
    """Lets in who sends a word of five bytes, and keeps the word."""

    def __init__(self, timeout_s: float = LIMIT_S) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = listener.getsockname()
        self.words: queue.Queue[bytes] = queue.Queue()
        self.on_word: Callable[[bytes], None] = self.words.put
        self.door = Door("inn", [listener], self._word, timeout_s, self._come_in)

    def visit(self, word: bytes = b"") -> socket.socket:
        sock = socket.create_connection(self.address, LIMIT_S)
        sock.sendall(word)
        return sock

    def _word(self, sock: socket.socket) -> Talk[bytes]:
        word = b""
        while len(word) < 5:
            word += yield from received(sock, 5 - len(word))
        if not word.isalpha():
            raise ProtocolError("a stranger", "says no word")
        yield from sent(sock, b"welcome")
        return word

    def _come_in(self, sock: socket.socket, word: bytes) -> None:
        self.on_word(word)
        sock.close()


@pytest.fixture
def inn() -> Iterator[Inn]:
    inn = Inn()
    yield inn
    inn.door.close(LIMIT_S)


def test_hundreds_of_silent_newcomers_cost_no_thread_and_keep_nobody_out(inn: Inn) -> None:
    threads = threading.active_count()
    with ExitStack() as strangers:
        crowd = [strangers.enter_context(closing(inn.visit())) for _ in range(300)]
        with inn.visit(b"hello") as guest:
            assert guest.recv(100) == b"welcome"
        assert inn.words.get(timeout=LIMIT_S) == b"hello"
        assert threading.active_count() <= threads  # of an earlier test one may end meanwhile
        for stranger in crowd[: 300 - MAX_NEWCOMERS]:  # the oldest had to leave
            assert stranger.recv(1) == b""


def test_a_newcomer_has_its_time_however_it_drips() -> None:
    inn = Inn(timeout_s=0.3)
    with closing(inn.visit(b"hel")) as stranger:
        assert stranger.recv(1) == b""
    inn.door.close(LIMIT_S)


@pytest.mark.parametrize("trouble", [RuntimeError("can't start new thread"), MemoryError(), OSError("full")])
def test_a_guest_for_whom_there_is_no_room_is_dropped_and_the_next_one_comes_in(inn: Inn, trouble: Exception) -> None:
    def refuse(word: bytes) -> None:
        inn.on_word = inn.words.put
        raise trouble

    inn.on_word = refuse
    with closing(inn.visit(b"first")) as guest:
        assert guest.recv(100) == b"welcome"
        assert guest.recv(1) == b""
    with closing(inn.visit(b"other")):
        assert inn.words.get(timeout=LIMIT_S) == b"other"


def test_a_talk_that_fails_ends_one_connection(inn: Inn) -> None:
    with closing(inn.visit(b"12345")) as stranger:
        assert stranger.recv(1) == b""
    with closing(inn.visit(b"hello")):
        assert inn.words.get(timeout=LIMIT_S) == b"hello"


def test_the_door_outlives_a_time_without_descriptors(inn: Inn) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as guest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (guest.fileno() + 1, hard))
        try:
            guest.connect(inn.address)
            guest.sendall(b"hello")
            with pytest.raises(queue.Empty):
                inn.words.get(timeout=0.3)
            assert inn.door.open
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert inn.words.get(timeout=LIMIT_S) == b"hello"


def test_a_closed_door_turns_away_who_talks_still(inn: Inn) -> None:
    with closing(inn.visit(b"hel")) as stranger:
        inn.door.close(LIMIT_S)
        assert not inn.door.open
        with suppress(ConnectionResetError):  # when it had not read the word yet
            assert stranger.recv(1) == b""


def test_a_dialer_does_not_wait_for_ever() -> None:
    def silent(sock: socket.socket) -> Talk[None]:
        yield selectors.EVENT_READ

    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        in_time(ours, silent(ours), 0.1)
