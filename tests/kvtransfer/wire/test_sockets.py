import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from baton_proto.discovery import TransferEndpoint
from kvtransfer.wire.sockets import MAX_UNIX_PATH_BYTES, connect, listen_unix
from runtime.errors import ConfigError


def test_a_unix_path_that_is_too_long_names_the_folder_to_change(tmp_path: Path) -> None:
    fits = tmp_path / ("x" * (MAX_UNIX_PATH_BYTES - len(str(tmp_path)) - 1))
    listen_unix(str(fits)).close()
    with pytest.raises(ConfigError, match=r"TMPDIR: .* is longer than the 107 bytes .* name a shorter folder"):
        listen_unix(f"{fits}x")


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[socket.socket, TransferEndpoint]]:
    """A Unix listener that has no place in its backlog for one more."""
    endpoint = TransferEndpoint("host", str(tmp_path / "kv.sock"), "127.0.0.1:1")
    with ExitStack() as stack:
        listener = stack.enter_context(closing(listen_unix(endpoint.unix_path)))
        while True:
            stranger = stack.enter_context(closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)))
            stranger.setblocking(False)
            try:
                stranger.connect(endpoint.unix_path)
            except BlockingIOError:
                break
        yield listener, endpoint


def test_who_finds_a_backlog_full_gets_the_next_place(crowded: tuple[socket.socket, TransferEndpoint]) -> None:
    listener, endpoint = crowded
    connected: list[socket.socket] = []
    peer = threading.Thread(target=lambda: connected.append(connect("unix", endpoint, 20.0)))
    peer.start()
    peer.join(0.1)
    assert peer.is_alive()
    listener.accept()[0].close()
    peer.join(20.0)
    with connected.pop() as sock:
        assert sock.gettimeout() == 20.0


def test_a_backlog_that_stays_full_is_a_timeout(crowded: tuple[socket.socket, TransferEndpoint]) -> None:
    with pytest.raises(TimeoutError, match=r"kv\.sock took no connection within 0\.2 s"):
        connect("unix", crowded[1], 0.2)
