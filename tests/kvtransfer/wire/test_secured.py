"""KV over TCP with TLS: who listens on the wire finds no KV, who is not of the cluster is turned away, and a link bears
what links without TLS bear."""

import queue
from functools import partial

import pytest
from msgspec.structs import replace

from baton_proto.worker import Grant
from kvtransfer.decode_side.events import Committed, Failed
from kvtransfer.prefill_side.push import PushResult
from runtime.security.cluster_key import ClusterKey, TlsMode, new_cluster_key
from tests.kvtransfer.peers import PREFILL_IDENTITY, TIMEOUT_S, assert_arrived, pair, words
from tests.tap import tapped

PLAIN = new_cluster_key()
SECURED = ClusterKey(PLAIN.secret, "on")
STRANGE = new_cluster_key("on")
PAYLOAD = b"the first token is 4711"
peers = partial(pair, "tcp")


def through(grant: Grant, address: str) -> Grant:
    return replace(grant, endpoint=replace(grant.endpoint, tcp_address=address))


@pytest.mark.parametrize(("mode", "readable"), [("off", True), ("on", False)])
def test_who_listens_between_two_workers_reads_kv_only_without_tls(mode: TlsMode, readable: bool) -> None:
    key = ClusterKey(PLAIN.secret, mode)
    with peers(key, key) as (decode, prefill), tapped(decode.receiver.endpoint.tcp_address) as tap:
        grant = decode.receiver.reserve([3, 4], 0)
        assert prefill.push(through(grant, tap.address), [1, 2], PAYLOAD).get(timeout=TIMEOUT_S).ok
        assert decode.wait_for(Committed, grant.transfer_id).payload == PAYLOAD
        assert_arrived(decode.slab, [3, 4], prefill.slab, [1, 2])
        block = words(prefill.slab)[2, 1].tobytes()
        names = [PREFILL_IDENTITY.worker_id.encode(), grant.transfer_id.encode()]
        assert [secret in tap.heard for secret in (block, PAYLOAD, *names)] == [readable] * 4
        assert len(tap.heard) > 2 * prefill.slab.layout.num_layers * prefill.slab.layout.block_bytes


def test_many_pushes_of_many_blocks_share_a_link_and_all_arrive() -> None:
    with peers(SECURED, SECURED) as (decode, prefill):
        grants, results = [], list[queue.Queue[PushResult]]()
        for number in range(8):
            grants.append(decode.receiver.reserve([4 * number + i for i in range(4)], 0))
            results.append(prefill.push(grants[-1], [5 * number + i for i in range(4)]))
        assert all(result.get(timeout=TIMEOUT_S).ok for result in results)
        for number, grant in enumerate(grants):
            assert_arrived(decode.slab, grant.block_ids, prefill.slab, [5 * number + i for i in range(4)])
        assert decode.receiver.check_integrity() == []


def test_a_cancel_reaches_the_sender_while_the_sender_sends() -> None:
    """Both directions of one connection are in use at once, by different threads."""
    with peers(SECURED, SECURED) as (decode, prefill):
        other = decode.receiver.reserve([0, 1], 0)
        for _ in range(20):
            grant = decode.receiver.reserve([3, 4], 0)
            push, results = prefill.begin(grant)
            sent = prefill.push(other, [7, 8])
            push.layer_ready(0, 0, [1, 2])
            decode.receiver.cancel(grant.transfer_id, "nobody waits")
            assert not results.get(timeout=TIMEOUT_S).ok
            assert sent.get(timeout=TIMEOUT_S).ok
            other = decode.receiver.reserve([0, 1], 0)
        decode.receiver.cancel(other.transfer_id, "over")
        assert decode.receiver.lease_count() == 0
        assert decode.receiver.check_integrity() == []


@pytest.mark.parametrize(
    ("decode_key", "prefill_key"),
    [(SECURED, STRANGE), (SECURED, PLAIN), (PLAIN, SECURED), (SECURED, None), (None, SECURED)],
    ids=["another cluster", "only the decode worker", "only the prefill worker", "no key", "no key there"],
)
def test_unless_both_ends_speak_tls_with_one_key_nothing_is_written(
    decode_key: ClusterKey | None, prefill_key: ClusterKey | None
) -> None:
    both_have_keys = decode_key is not None and prefill_key is not None and prefill_key.tls is not None
    with peers(decode_key, prefill_key, connect_timeout_s=TIMEOUT_S if both_have_keys else 2.0) as (decode, prefill):
        grant = decode.receiver.reserve([1], 0, ttl_s=60)
        result = prefill.push(grant, [1]).get(timeout=TIMEOUT_S)
        assert not result.ok
        if both_have_keys:
            assert "security.internal_tls" in result.reason
        assert not words(decode.slab).any()
        decode.receiver.cancel(grant.transfer_id, "over")
        assert decode.receiver.lease_count() == 0


def test_a_connection_that_breaks_in_mid_transfer_fails_the_lease_and_writes_no_more() -> None:
    with peers(SECURED, SECURED) as (decode, prefill), tapped(decode.receiver.endpoint.tcp_address) as tap:
        grant = decode.receiver.reserve([3, 4], 0)
        push, results = prefill.begin(through(grant, tap.address))
        push.layer_ready(0, 0, [1, 2])
        tap.close()
        assert not results.get(timeout=TIMEOUT_S).ok
        decode.receiver.cancel(grant.transfer_id, "over")
        assert decode.receiver.lease_count() == 0
        assert not decode.of(grant.transfer_id) or decode.wait_for(Failed, grant.transfer_id)
