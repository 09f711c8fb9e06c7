"""Both ends of KV transfers for tests: in this process, in child processes, and raw sockets that say what they like."""

import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.decode_side.events import Committed, Released, TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.push import Push, PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.mapped import MAX_FDS
from kvtransfer.wire.framing import Channel
from kvtransfer.wire.identity import SlabIdentity, hello
from runtime.address import parse_address
from runtime.config.serving import TransferConfig
from runtime.security.cluster_key import ClusterKey

LAYOUT = SlabLayout(num_layers=4, num_blocks=32, num_kv_heads=2, block_size=16, head_dim=16, dtype="float32")
PREFILL_LAYOUT = SlabLayout(num_layers=4, num_blocks=48, num_kv_heads=2, block_size=16, head_dim=16, dtype="float32")
DECODE_IDENTITY = SlabIdentity("decode-0", 7, "model", LAYOUT)
PREFILL_IDENTITY = SlabIdentity("prefill-0", 3, "model", PREFILL_LAYOUT)
TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]

Event = TypeVar("Event", bound=TransferEvent)


class PatientConfig(TransferConfig, frozen=True, forbid_unknown_fields=True):
    """Of peers that wait for each other while a busy machine stands still. A test whose peer is to lose its patience
    names its own `connect_timeout_s`, which is a constant elsewhere."""

    connect_timeout_s: float = TIMEOUT_S


def patient(**settings: Any) -> TransferConfig:
    return PatientConfig(**settings)


def words(slab: Slab) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """The slab as bits, `[layers, blocks, words]`: floats would not compare equal to themselves when they are NaN."""
    layout = slab.layout
    return np.frombuffer(slab.buffer, dtype=np.uint32).reshape(layout.num_layers, layout.num_blocks, -1)


def fill(slab: Slab, seed: int) -> None:
    view = words(slab)
    view[:] = np.random.default_rng(seed).integers(1, 2**32, view.shape, dtype=np.uint32)


class Decode:
    """A slab with a receiver, and everything that it reported."""

    def __init__(
        self,
        config: TransferConfig,
        identity: SlabIdentity = DECODE_IDENTITY,
        others: Sequence[AdoptedSlab] = (),
        key: ClusterKey | None = None,
    ) -> None:
        self.slab = Slab(identity.slab_layout)
        self.events: list[TransferEvent] = []
        self._changed = threading.Condition()
        self.receiver = Receiver(self.slab, identity, config, "127.0.0.1", self._on_event, others, key)

    def of(self, transfer_id: str) -> list[TransferEvent]:
        with self._changed:
            return [event for event in self.events if event.transfer_id == transfer_id]

    def wait_for(self, kind: type[Event], transfer_id: str, **fields: object) -> Event:
        """The first event of a kind, of a transfer, with these fields; fails when none comes."""

        def found() -> Event | None:
            for event in self.events:
                if not isinstance(event, kind) or event.transfer_id != transfer_id:
                    continue
                if all(getattr(event, name) == value for name, value in fields.items()):
                    return event
            return None

        with self._changed:
            assert self._changed.wait_for(found, TIMEOUT_S), f"no {kind.__name__} {fields}; events: {self.events}"
            event = found()
        assert event is not None
        return event

    def wait_ended(self, transfer_id: str) -> None:
        """Until nobody can write the transfer's blocks any more."""

        def ended() -> bool:
            return any(isinstance(event, Released | Committed) for event in self.of(transfer_id))

        with self._changed:
            assert self._changed.wait_for(ended, TIMEOUT_S), f"not ended; events: {self.of(transfer_id)}"

    def run_out_of_time(self) -> None:
        """All leases, now: a test that let the clock do it would have to be quicker than their time."""
        self.receiver._ledger.expire(math.inf)
        self.receiver._wake.set()

    def close(self) -> None:
        self.receiver.close()
        self.slab.close()

    def _on_event(self, event: TransferEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()


class Prefill:
    """A slab with random content and a sender."""

    def __init__(
        self,
        config: TransferConfig,
        identity: SlabIdentity = PREFILL_IDENTITY,
        seed: int = 0,
        key: ClusterKey | None = None,
    ) -> None:
        self.slab = Slab(identity.slab_layout)
        fill(self.slab, seed)
        self.sender = Sender(self.slab, identity, config, key)

    def begin(self, grant: Grant) -> tuple[Push, "queue.Queue[PushResult]"]:
        results: queue.Queue[PushResult] = queue.Queue()
        return self.sender.begin(grant, results.put), results

    def push(self, grant: Grant, source: Sequence[int], payload: bytes = b"first token") -> "queue.Queue[PushResult]":
        """A whole transfer, block i of the grant from source[i]."""
        push, results = self.begin(grant)
        for layer in range(self.slab.layout.num_layers):
            push.layer_ready(layer, 0, source)
        push.commit(payload)
        return results

    def close(self) -> None:
        self.sender.close()
        self.slab.close()


@contextmanager
def pair(
    transport: str = "auto",
    decode_key: ClusterKey | None = None,
    prefill_key: ClusterKey | None = None,
    **settings: Any,
) -> Iterator[tuple[Decode, Prefill]]:
    """Both ends in this process, closed at the end."""
    config = patient(transport=transport, **settings)
    decode, prefill = Decode(config, key=decode_key), Prefill(config, key=prefill_key)
    try:
        yield decode, prefill
    finally:
        prefill.close()
        decode.close()


def assert_arrived(decode: Slab, destination: Sequence[int], prefill: Slab, source: Sequence[int]) -> None:
    assert np.array_equal(words(decode)[:, list(destination)], words(prefill)[:, list(source)])


class RawPeer:
    """A prefill worker that keeps to the protocol exactly as far as a test wants."""

    def __init__(
        self,
        grant: Grant,
        *,
        unix: bool,
        greet: bool = True,
        identity: SlabIdentity = PREFILL_IDENTITY,
        transport: str | None = None,
        expects_welcome: bool = True,
    ) -> None:
        """`transport` None: shm or tcp, after the kind of the socket."""
        if unix:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.connect(grant.endpoint.unix_path)
        else:
            self.sock = socket.create_connection(parse_address(grant.endpoint.tcp_address))
        self.sock.settimeout(TIMEOUT_S)
        self.channel: Channel[wire.ToPrefill] = Channel(self.sock, wire.decode_to_prefill, "the decode worker")
        self.fds: list[int] = []
        self.grant = grant
        if greet:
            usual = "shm" if unix else "tcp"
            self.channel.send(hello(identity, grant, usual if transport is None else transport))
        if greet and expects_welcome:
            answer, self.fds = self.channel.receive_with_fds(MAX_FDS if unix else 0)
            assert isinstance(answer, wire.Welcome), answer

    def begin(self) -> wire.ToPrefill | None:
        self.channel.send(wire.Begin(self.grant.transfer_id, len(self.grant.block_ids), checksum=False))
        return self.channel.receive()

    def closed_by_peer(self) -> bool:
        """Reads to the end."""
        try:
            while self.sock.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)


class PeerProcess:
    """A child of tests/kvtransfer/peer_process.py: JSON lines in, JSON lines out."""

    def __init__(self, role: str, **settings: Any) -> None:
        command = [sys.executable, "-m", "tests.kvtransfer.peer_process", role, json.dumps(settings)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.hear() == {"ready": True}  # its start takes a while, which is nobody's deadline

    def tell(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """SIGKILL; the pipes stay open."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
            self.process.stdout.close()


@contextmanager
def child(role: str, **settings: Any) -> Iterator[PeerProcess]:
    process = PeerProcess(role, **settings)
    try:
        yield process
    finally:
        process.close()
