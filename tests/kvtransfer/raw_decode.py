"""A decode worker on TCP that answers only what a test lets it answer."""

import queue
import socket
import threading
from typing import TypeVar

from baton_proto import transfer as wire
from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Grant
from kvtransfer.wire.framing import Channel
from tests.kvtransfer.peers import LAYOUT, TIMEOUT_S

Message = TypeVar("Message", bound=wire.ToDecode)


class RawDecode:
    transfer_id = "transfer"

    def __init__(self, *, accept: bool = True, read_blocks: bool = True) -> None:
        self._accept = accept
        self._read_blocks = read_blocks
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._messages: queue.Queue[wire.ToDecode] = queue.Queue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def grant(self, blocks: list[int]) -> Grant:
        endpoint = TransferEndpoint("another host", "", f"127.0.0.1:{self._listener.getsockname()[1]}", ("tcp",))
        return Grant(self.transfer_id, "decode-0", 7, 1, blocks, 0, TIMEOUT_S, endpoint)

    def heard(self, kind: type[Message]) -> Message:
        """Waits for a message of a kind; earlier ones of other kinds are dropped."""
        while not isinstance(message := self._messages.get(timeout=TIMEOUT_S), kind):
            pass
        return message

    def close(self) -> None:
        self._over.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._listener.close()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock:
            channel: Channel[wire.ToDecode] = Channel(sock, wire.decode_to_decode, "the prefill worker")
            try:
                while (message := channel.receive()) is not None:
                    self._messages.put(message)
                    if isinstance(message, wire.Hello):
                        channel.send_now(wire.Welcome(wire.MAJOR, LAYOUT.num_blocks, 1))
                    elif isinstance(message, wire.Begin) and self._accept:
                        channel.send_now(wire.Accept(message.transfer_id))
                    elif isinstance(message, wire.Blocks):
                        if not self._read_blocks:
                            self._over.wait(TIMEOUT_S)
                            return
                        channel.receive_into([memoryview(bytearray(message.count * LAYOUT.block_bytes))])
            except ConnectionError:
                return
