"""The socket between a worker process and the process of vLLM that computes for it: packets, and one descriptor."""

import socket
from pathlib import Path

import msgspec

from engine.vllm.kv.messages import CacheMemory, FromVllm, ToVllm, Unshared, decode_from_vllm, decode_to_vllm, encode
from kvtransfer.wire.sockets import limit_sending
from runtime.errors import ConfigError, ProtocolError, UnavailableError

SEND_TIMEOUT_S = 30.0  # vLLM reads between its steps
MAX_PACKET_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20  # as far as the kernel lets us
ADVICE = "set it to 0, so that workers with vLLM run their prompts themselves"


class VllmEnd:
    """In vLLM. One thread."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._socket = _socket()
        self._socket.connect(path)
        limit_sending(self._socket, SEND_TIMEOUT_S)

    def introduce(self, memory: CacheMemory, fd: int) -> None:
        socket.send_fds(self._socket, [encode(memory)], [fd])

    def send(self, message: FromVllm) -> None:
        """Raises OSError when the worker process has ended or takes nothing."""
        self._socket.send(encode(message))

    def news(self) -> list[ToVllm]:
        """What has come since the last call. Raises OSError when the worker process has ended."""
        return [decode_to_vllm(packet) for packet in _packets(self._socket)]

    def close(self) -> None:
        self._socket.close()


class WorkerEnd:
    """In the worker process. Event loop only."""

    def __init__(self, path: Path) -> None:
        """Listens; who can enter the folder can connect."""
        self._socket = _socket()
        self._socket.bind(str(path))
        self._socket.listen(1)

    def accept(self, timeout_s: float) -> tuple[CacheMemory, int]:
        """vLLM's memory, and the descriptor that the caller closes. Raises UnavailableError, or ConfigError where this
        model's memory cannot be shared."""
        listener = self._socket
        listener.settimeout(timeout_s)
        try:
            self._socket, _ = listener.accept()
            self._socket.settimeout(timeout_s)
            packet, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            memory = decode_from_vllm(packet)
            self._socket.settimeout(None)  # with a timeout of Python's, MSG_DONTWAIT would wait
            limit_sending(self._socket, SEND_TIMEOUT_S)
        except (OSError, msgspec.DecodeError) as error:
            raise UnavailableError(f"vLLM did not share its KV cache: {error}") from error
        finally:
            listener.close()
        if isinstance(memory, Unshared):
            raise ConfigError("workers.prefill", f"{memory.reason}: {ADVICE}")
        if not isinstance(memory, CacheMemory) or len(fds) != 1:
            raise UnavailableError("vLLM did not share its KV cache")
        return memory, fds[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ToVllm) -> None:
        """Raises UnavailableError."""
        try:
            self._socket.send(encode(message))
        except OSError as error:
            raise UnavailableError(f"vLLM takes no news of its KV blocks: {error}") from error

    def news(self) -> list[FromVllm] | None:
        """What has come since the last call; None: vLLM has ended. Raises ProtocolError."""
        try:
            return [decode_from_vllm(packet) for packet in _packets(self._socket)]
        except OSError:
            return None
        except msgspec.DecodeError as error:
            raise ProtocolError("vLLM's connector", str(error)) from error

    def close(self) -> None:
        self._socket.close()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return made


def _packets(sock: socket.socket) -> list[bytes]:
    """Raises ConnectionResetError at the end of the connection."""
    packets: list[bytes] = []
    while True:
        try:
            packet = sock.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return packets
        if not packet:
            if packets:
                return packets
            raise ConnectionResetError("the other process has ended")
        packets.append(packet)
