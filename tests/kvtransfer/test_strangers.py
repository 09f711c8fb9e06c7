"""The port of a KV receiver under strangers and without threads: peers that have the grant are served on."""

import threading
from contextlib import ExitStack, closing

import pytest

from runtime.security.cluster_key import ClusterKey, new_cluster_key
from tests.kvtransfer.peers import TIMEOUT_S, Decode, Prefill, RawPeer, assert_arrived, pair, patient

both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@both
@pytest.mark.parametrize("key", [None, new_cluster_key()], ids=["no key", "a key"])
def test_silent_strangers_cost_no_thread_and_keep_no_peer_out(transport: str, key: ClusterKey | None) -> None:
    config = patient(transport=transport)
    decode, prefill = Decode(config, key=key), Prefill(config, key=key)
    grant = decode.receiver.reserve([3, 4], 0)
    threads = threading.active_count()
    with ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(closing(RawPeer(grant, unix=transport == "shm", greet=False)))
        assert threading.active_count() == threads
        assert prefill.push(grant, [1, 2]).get(timeout=TIMEOUT_S).ok
        assert_arrived(decode.slab, [3, 4], prefill.slab, [1, 2])
    prefill.close()
    decode.close()


@both
def test_a_peer_for_whom_no_thread_can_be_started_is_served_later(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def start_few(thread: threading.Thread) -> None:
        if thread.name.startswith("kv-receive") and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with pair(transport) as (decode, prefill):
        monkeypatch.setattr(threading.Thread, "start", start_few)
        assert not prefill.push(decode.receiver.reserve([1], 0), [1]).get(timeout=TIMEOUT_S).ok
        assert refused.is_set()
        assert decode.receiver.problem == ""
        assert prefill.push(decode.receiver.reserve([2], 0), [2]).get(timeout=TIMEOUT_S).ok


def test_a_receiver_without_its_door_says_so() -> None:
    with pair() as (decode, _):
        assert decode.receiver.problem == ""
        decode.receiver._door.close(TIMEOUT_S)
        assert decode.receiver.problem == "the KV receiver's door thread has ended"
