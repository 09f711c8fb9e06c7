"""Nothing is written between slabs that do not fit, and the error names the field and both values."""

from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from baton_proto import transfer as wire
from kvtransfer.prefill_side import dial
from kvtransfer.wire.identity import SlabIdentity, check_hello, hello
from runtime.errors import HandshakeError
from runtime.streams.length_prefix import framed
from tests.kvtransfer.peers import (
    DECODE_IDENTITY,
    PREFILL_IDENTITY,
    PREFILL_LAYOUT,
    TIMEOUT_S,
    Decode,
    Prefill,
    RawPeer,
    pair,
    patient,
    words,
)

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def other_layout(**change: object) -> SlabIdentity:
    return replace(PREFILL_IDENTITY, layout=replace(PREFILL_LAYOUT, **change))


@both
@pytest.mark.parametrize(
    ("identity", "field", "ours", "theirs"),
    [
        (replace(PREFILL_IDENTITY, model_hash="another"), "model_hash", "another", "model"),
        (other_layout(dtype="bfloat16"), "dtype", "bfloat16", "float32"),
        (other_layout(num_layers=5), "num_layers", "5", "4"),
        (other_layout(num_kv_heads=4), "num_kv_heads", "4", "2"),
        (other_layout(block_size=32), "block_size", "32", "16"),
        (other_layout(head_dim=8), "head_dim", "8", "16"),
    ],
)
def test_a_slab_that_does_not_fit_is_refused(
    transport: str, identity: SlabIdentity, field: str, ours: str, theirs: str
) -> None:
    config = patient(transport=transport)
    decode, prefill = Decode(config), Prefill(config, identity)
    grant = decode.receiver.reserve([1, 2], 0)
    result = prefill.push(grant, [1, 2]).get(timeout=TIMEOUT_S)
    assert not result.ok
    assert f"{field} differs: ours {ours!r}, theirs {theirs!r}" in result.reason
    assert not words(decode.slab).any()
    assert decode.receiver.lease_count() == 1  # nobody began it: it waits for its deadline or its owner
    prefill.close()
    decode.close()


@both
@pytest.mark.parametrize(("field", "stale"), [("incarnation", 6), ("generation", 9), ("worker_id", "decode-1")])
def test_a_grant_of_another_life_is_refused(transport: str, field: str, stale: int | str) -> None:
    with pair(transport) as (decode, prefill):
        grant = msgspec.structs.replace(decode.receiver.reserve([1, 2], 0), **{field: stale})
        result = prefill.push(grant, [1, 2]).get(timeout=TIMEOUT_S)
        assert f"{field} differs: ours {str(stale)!r}" in result.reason
        assert not words(decode.slab).any()


@both
def test_another_version_of_baton_or_of_the_protocol_is_refused_with_a_sentence(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(transport) as (decode, prefill):
        for block, change, said in (
            (1, {"code": "0.0.1"}, "version of Baton differs: ours '0.0.1', theirs "),
            (2, {"version": wire.MAJOR + 1}, f"protocol version differs: ours '{wire.MAJOR + 1}', theirs"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(dial, "hello", lambda *of, change=change: msgspec.structs.replace(hello(*of), **change))
                result = prefill.push(decode.receiver.reserve([block], 0), [1]).get(timeout=TIMEOUT_S)
            assert said in result.reason
            assert not words(decode.slab).any()


@both
def test_a_connection_of_before_a_suspend_begins_nothing_afterwards(transport: str) -> None:
    with pair(transport) as (decode, prefill):
        assert prefill.push(decode.receiver.reserve([1], 0), [1]).get(timeout=TIMEOUT_S).ok
        old = decode.receiver.reserve([2], 0)
        decode.receiver.cancel(old.transfer_id, "going to sleep")
        decode.slab.suspend()
        assert "suspended" in prefill.push(old, [1]).get(timeout=TIMEOUT_S).reason
        decode.slab.resume()
        assert "suspended" in prefill.push(old, [1]).get(timeout=TIMEOUT_S).reason
        fresh = decode.receiver.reserve([1], 0)
        assert fresh.generation == 2
        assert prefill.push(fresh, [1]).get(timeout=TIMEOUT_S).ok


def test_another_major_version_of_the_protocol_is_refused_by_name() -> None:
    with pair() as (decode, _):
        grant = decode.receiver.reserve([1], 0)
        said = msgspec.structs.replace(hello(PREFILL_IDENTITY, grant, "tcp"), version=wire.MAJOR + 1)
        with pytest.raises(
            HandshakeError, match=f"protocol version differs: ours {wire.MAJOR}, theirs {wire.MAJOR + 1}"
        ):
            check_hello(said, DECODE_IDENTITY, generation=1)
        peer = RawPeer(grant, unix=False, greet=False)
        peer.channel.send(said)
        assert peer.channel.receive() == wire.Refused("protocol version", str(wire.MAJOR), str(wire.MAJOR + 1))
        assert peer.closed_by_peer()
        peer.close()


@both
def test_an_opening_that_is_no_message_is_the_peers_fault(transport: str) -> None:
    with pair(transport) as (decode, prefill), capture_logs() as logs:
        peer = RawPeer(decode.receiver.reserve([1], 0), unix=transport == "shm", greet=False)
        peer.sock.sendall(framed(b"\xc1"))
        assert peer.closed_by_peer()
        peer.close()
        assert prefill.push(decode.receiver.reserve([2], 0), [1]).get(timeout=TIMEOUT_S).ok
    assert [row["log_level"] for row in logs if row["event"] == "turned away"] == ["warning"]
