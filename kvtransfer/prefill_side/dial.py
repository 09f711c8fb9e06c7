"""Opens the prefill side of a connection: picks the transport, shakes hands, returns what writes blocks."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.slab.head_plan import Part, fits, parts
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.mapped import MAX_FDS
from kvtransfer.transports.shm import ShmWriter
from kvtransfer.transports.tcp import TcpWriter, tune
from kvtransfer.transports.transport import STALL_TIMEOUT_S, BlockWriter, limit_sending
from kvtransfer.transports.ways import MAPPED, NCCL, obstacle, takes_nccl, ways
from kvtransfer.wire.framing import Channel
from kvtransfer.wire.host import host_id
from kvtransfer.wire.identity import SlabIdentity, hello, rank_layout
from kvtransfer.wire.proving import prove
from runtime.config.serving import TransferConfig
from runtime.errors import HandshakeError, ProtocolError, TransferError, UnavailableError
from runtime.security.cluster_key import ClusterKey
from runtime.security.handshake import KV_PLANE, dialing

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Dialled:
    channel: Channel[wire.ToPrefill]
    writer: BlockWriter
    peer_layout: SlabLayout  # of each of its slabs
    parts: tuple[Part, ...]  # what we send


def dial(slab: Slab, identity: SlabIdentity, config: TransferConfig, grant: Grant, key: ClusterKey | None) -> Dialled:
    """Raises HandshakeError when the slabs do not fit, another BatonError or OSError when no connection comes about."""
    *others, last = _ways(slab, config.transport, grant)
    for way in others:
        try:
            return _greet(way, slab, identity, config, grant, key)
        except (OSError, UnavailableError) as error:  # another mount or network namespace; GPUs without a link
            log.info("a transport does not work", worker_id=grant.worker_id, transport=way, error=str(error))
    return _greet(last, slab, identity, config, grant, key)


def _ways(slab: Slab, transport: str, grant: Grant) -> list[str]:
    """One at least. Raises TransferError."""
    memory, endpoint = slab.driver.kind, grant.endpoint
    has_nccl = takes_nccl(transport, memory)
    if transport != "auto":
        if problem := obstacle(transport, memory, endpoint, has_nccl=has_nccl):
            raise TransferError(grant.transfer_id, f"{transport} is forced here, but {problem}")
        return [transport]
    possible = ways(memory, endpoint, host_id(), has_nccl=has_nccl)
    if not possible:
        raise TransferError(grant.transfer_id, "the decode worker offers no TCP, and its slab cannot be mapped")
    return possible


def _connect_unix(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_tcp(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise ProtocolError("grant", f"{address!r} is no HOST:PORT")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    tune(sock)
    return sock


def _greet(
    way: str, slab: Slab, identity: SlabIdentity, config: TransferConfig, grant: Grant, key: ClusterKey | None
) -> Dialled:
    """Proofs of the cluster key, Hello, Welcome."""
    timeout_s = config.connect_timeout_s
    mapped = way == MAPPED[slab.driver.kind]
    if mapped:
        sock = _connect_unix(grant.endpoint.unix_path, timeout_s)
    else:
        sock = _connect_tcp(grant.endpoint.tcp_address, timeout_s)
    channel: Channel[wire.ToPrefill] = Channel(sock, wire.to_prefill_decoder, f"decode worker {grant.worker_id}")
    try:
        if key is not None:
            prove(sock, dialing(key, KV_PLANE, channel.peer), timeout_s)
            sock.settimeout(timeout_s)
        channel.send(hello(identity, grant, nccl=way == NCCL))
        answer, fds = channel.receive_with_fds(MAX_FDS if mapped else 0)
        try:
            welcome = _checked(answer, channel.peer, identity.layout.num_kv_heads)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        peer_layout = replace(rank_layout(identity.layout, welcome.size), num_blocks=welcome.num_blocks)
        plan = parts(identity.shard, welcome.size, identity.layout.num_kv_heads)
        if mapped:
            writer = _mapped_writer(channel, slab, peer_layout, plan, fds)
        elif way == NCCL:
            writer = _nccl_writer(channel, slab, plan, welcome, timeout_s)
        else:
            writer = TcpWriter(channel, slab, plan)
        sock.settimeout(None)
        limit_sending(sock, STALL_TIMEOUT_S)
    except BaseException:
        channel.close()
        raise
    return Dialled(channel, writer, peer_layout, plan)


def _checked(answer: wire.ToPrefill | None, peer: str, num_kv_heads: int) -> wire.Welcome:
    """Raises HandshakeError when it is a refusal, ProtocolError when it is no answer to Hello."""
    if isinstance(answer, wire.Refused):
        raise HandshakeError(answer.field, ours=answer.theirs, theirs=answer.ours)
    if not isinstance(answer, wire.Welcome):
        raise ProtocolError(peer, f"answered Hello with {type(answer).__name__}, not Welcome")
    if not fits(answer.size, num_kv_heads):
        raise ProtocolError(peer, f"says it has {answer.size} ranks, for {num_kv_heads} KV heads")
    return answer


def _mapped_writer(
    channel: Channel[wire.ToPrefill], slab: Slab, peer_layout: SlabLayout, plan: Sequence[Part], fds: list[int]
) -> BlockWriter:
    if slab.driver.kind == "host":
        return ShmWriter(channel, slab, peer_layout, plan, fds)
    from kvtransfer.transports.cuda_ipc import (
        CudaIpcWriter,  # here, because Triton is installed only where there is a GPU
    )

    return CudaIpcWriter(channel, slab, peer_layout, plan, fds)


def _nccl_writer(
    channel: Channel[wire.ToPrefill], slab: Slab, plan: Sequence[Part], welcome: wire.Welcome, timeout_s: float
) -> BlockWriter:
    from kvtransfer.transports.nccl import NcclWriter

    return NcclWriter(channel, slab, plan, welcome.pair_id, timeout_s)
