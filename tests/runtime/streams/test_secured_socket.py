"""A socket with TLS behaves as the socket without: whole messages, both directions at once, an end, a timeout."""

import contextlib
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from runtime.security.internal_tls import InternalTls
from runtime.streams.secured_socket import SecuredSocket

SEED = bytes(range(32))
TIMEOUT_S = 30.0
SIZES = [1, 4, 70, 16_384, 16_385, 65_536, 65_541, 100_000, (1 << 20) - 1, (1 << 20) + 70_000, 3_000_000]

Pair = tuple[SecuredSocket, SecuredSocket]
T = TypeVar("T")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def shaken(client_seed: bytes = SEED, options: int = 0) -> Pair:
    ours, theirs = tcp_pair()
    tls, servers = InternalTls(client_seed), InternalTls(SEED)
    for context in (tls.client(), servers.server()):
        context.options |= options
    client = SecuredSocket(ours, tls.client(), tls.name)
    server = SecuredSocket(theirs, servers.server())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(server.shake_hands)
        try:
            client.shake_hands()
            done.result(TIMEOUT_S)
        except BaseException:
            client.close()
            server.close()
            raise
    return client, server


@pytest.fixture
def pair() -> Iterator[Pair]:
    client, server = shaken()
    yield client, server
    client.close()
    server.close()


def send_all(sock: SecuredSocket, message: bytes, cut: random.Random) -> None:
    """As views of all sizes, some of which one call does not take."""
    views = []
    left = memoryview(message)
    while left:
        size = min(len(left), cut.choice([7, 5000, 24_576, 200_000, 2_000_000]))
        views.append(left[:size])
        left = left[size:]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def begun(receive: Callable[[], T]) -> "Future[T]":
    """On a thread that holds up no other test when it misses its end."""
    heard: Future[T] = Future()
    threading.Thread(target=lambda: heard.set_result(receive()), daemon=True).start()
    return heard


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_all_sizes_arrive_whole_in_both_directions_at_once(pair: Pair, seed: int) -> None:
    source = random.Random(seed)
    messages = [source.randbytes(size) for size in source.sample(SIZES, len(SIZES))]

    def send(sock: SecuredSocket) -> None:
        for message in messages:
            send_all(sock, message, random.Random(seed))

    def receive(sock: SecuredSocket) -> None:
        for message in messages:
            landing = bytearray(len(message))
            middle = len(message) // 3
            views = [memoryview(landing)[:middle], memoryview(landing)[middle:]]
            assert sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0] == len(message)
            assert landing == message

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(do, sock) for sock in pair for do in (send, receive)]
        for each in work:
            each.result(TIMEOUT_S)


@pytest.mark.parametrize("options", [0, ssl.OP_IGNORE_UNEXPECTED_EOF], ids=["Python 3.11.4", "Python 3.11.2"])
def test_an_end_in_mid_message_gives_what_came(options: int) -> None:
    client, server = shaken(options=options)
    with client, server:
        landing = bytearray(200_000)
        received = begun(lambda: server.recvmsg_into([memoryview(landing)]))
        client.sendall(b"x" * 100_000)
        client.shutdown(socket.SHUT_RDWR)
        assert received.result(TIMEOUT_S)[0] == 100_000
        assert server.recv(4, socket.MSG_WAITALL) == b""


@pytest.mark.parametrize("options", [0, ssl.OP_IGNORE_UNEXPECTED_EOF], ids=["Python 3.11.4", "Python 3.11.2"])
def test_another_thread_wakes_one_that_waits(options: int) -> None:
    client, server = shaken(options=options)
    with client, server:
        heard = begun(lambda: client.recv(4, socket.MSG_WAITALL))
        client.shutdown(socket.SHUT_RDWR)
        assert heard.result(TIMEOUT_S) == b""


def test_a_peer_that_closes_its_tls_and_not_its_socket_has_ended(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"last")
    with contextlib.suppress(ssl.SSLWantReadError):
        client._tls.unwrap()
    socket.socket.sendall(client, client._to_peer.read())
    assert server.recv(8, socket.MSG_WAITALL) == b"last"
    assert server.recv(8) == b""


def test_a_silent_peer_is_a_timeout_and_a_socket_that_does_not_block_says_so(pair: Pair) -> None:
    client, _ = pair
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        client.recv(1)


def test_what_a_full_socket_does_not_take_is_sent_with_the_next_try_and_only_once(pair: Pair) -> None:
    client, server = pair
    client.setblocking(False)
    message = random.Random(1).randbytes(5_000_000)
    landing = bytearray(len(message))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(server.recvmsg_into, [memoryview(landing)])
        left = memoryview(message)
        while left:
            try:
                left = left[client.send(left) :]
            except BlockingIOError:
                continue
        assert received.result(TIMEOUT_S)[0] == len(message)
    assert landing == message


def test_a_peer_of_another_cluster_does_not_come_in() -> None:
    with pytest.raises(ssl.SSLError):
        shaken(bytes(32))
