"""Opens the prefill side of a connection: picks the transport, shakes hands, returns what writes blocks."""

import os
from dataclasses import dataclass, replace

import structlog

from baton_proto import transfer as wire
from baton_proto.worker import Grant
from kvtransfer.slab.head_plan import Part, fits, parts
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import EngineSlab
from kvtransfer.transports.mapped import MAX_FDS
from kvtransfer.transports.table import AUTO, TRANSPORTS, obstacle, possible
from kvtransfer.transports.transport import BlockWriter, PrefillEnd, Transport
from kvtransfer.wire.framing import Channel
from kvtransfer.wire.identity import SlabIdentity, hello, rank_layout
from kvtransfer.wire.proving import prove
from kvtransfer.wire.sockets import STALL_TIMEOUT_S, connect, limit_sending, secured, shake_hands
from runtime.config.serving import TransferConfig
from runtime.errors import HandshakeError, ProtocolError, TransferError, UnavailableError
from runtime.host import host_id
from runtime.security.cluster_key import ClusterKey, TlsMode
from runtime.security.handshake import KV_PLANE, dialing

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Dialled:
    channel: Channel[wire.ToPrefill]
    transport: str
    writer: BlockWriter
    peer_layout: SlabLayout  # of each of the peer's slabs
    parts: tuple[Part, ...]  # what we send


def dial(
    slab: EngineSlab, identity: SlabIdentity, config: TransferConfig, grant: Grant, key: ClusterKey | None
) -> Dialled:
    """Raises HandshakeError when the slabs do not fit, another BatonError or OSError when no connection comes about."""
    *others, last = _candidates(slab, config.transport, grant, "off" if key is None else key.mode)
    for transport in others:
        try:
            return _greet(transport, slab, identity, config, grant, key)
        except (OSError, UnavailableError) as error:  # another mount or network namespace; GPUs without a link
            log.info("a transport does not work", worker_id=grant.worker_id, transport=transport.name, error=str(error))
    return _greet(last, slab, identity, config, grant, key)


def _candidates(slab: EngineSlab, wanted: str, grant: Grant, tls: TlsMode) -> list[Transport]:
    """At least one transport. Raises TransferError."""
    memory, endpoint = slab.driver.kind, grant.endpoint
    if rows := possible(wanted, memory, endpoint, host_id(), tls):
        return rows
    problem = "the decode worker offers no TCP, and its slab cannot be mapped"
    if wanted != AUTO:
        forced = next(row for row in TRANSPORTS if row.name == wanted)
        problem = f"{wanted} is forced here, but {obstacle(forced, memory, endpoint, needs_tls=tls == 'on')}"
    raise TransferError(grant.transfer_id, problem)


def _greet(
    transport: Transport,
    slab: EngineSlab,
    identity: SlabIdentity,
    config: TransferConfig,
    grant: Grant,
    key: ClusterKey | None,
) -> Dialled:
    """Exchanges proofs of the cluster key, then Hello and Welcome."""
    timeout_s = config.connect_timeout_s
    make_writer, _ = transport.load()
    sock = secured(connect(transport.socket, grant.endpoint, timeout_s), key, dialing=True)
    channel: Channel[wire.ToPrefill] = Channel(sock, wire.decode_to_prefill, f"decode worker {grant.worker_id}")
    try:
        shake_hands(sock, channel.peer, timeout_s)
        if key is not None:
            prove(sock, dialing(key, KV_PLANE, channel.peer), timeout_s)
            sock.settimeout(timeout_s)
        channel.send(hello(identity, grant, transport.name))
        answer, fds = channel.receive_with_fds(MAX_FDS if transport.socket == "unix" else 0)
        try:
            welcome = _checked(answer, channel.peer, identity.layout.num_kv_heads)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        peer_layout = replace(
            rank_layout(identity.layout, welcome.size),
            num_blocks=welcome.num_blocks,
            num_window_blocks=welcome.num_window_blocks,
        )
        plan = parts(identity.shard, welcome.size, identity.layout.num_kv_heads)
        writer = make_writer(PrefillEnd(channel, slab, peer_layout, plan, welcome, fds, timeout_s))
        sock.settimeout(None)
        limit_sending(sock, STALL_TIMEOUT_S)
    except BaseException:
        channel.close()
        raise
    return Dialled(channel, transport.name, writer, peer_layout, plan)


def _checked(answer: wire.ToPrefill | None, peer: str, num_kv_heads: int) -> wire.Welcome:
    """Raises HandshakeError when it is a refusal, ProtocolError when it is no answer to Hello."""
    if isinstance(answer, wire.Refused):
        raise HandshakeError(answer.field, ours=answer.theirs, theirs=answer.ours)
    if not isinstance(answer, wire.Welcome):
        raise ProtocolError(peer, f"answered Hello with {type(answer).__name__}, not Welcome")
    if not fits(answer.size, num_kv_heads):
        raise ProtocolError(peer, f"says it has {answer.size} ranks, for {num_kv_heads} KV heads")
    return answer
