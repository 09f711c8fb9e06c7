"""The proof of the cluster key: who has it gets in, and nothing that can be heard, repeated or bent gets in without."""

import secrets

import pytest

from runtime.errors import ProtocolError
from runtime.security.cluster_key import ClusterKey, new_cluster_key
from runtime.security.handshake import (
    KV_PLANE,
    MAGIC,
    NONCE_BYTES,
    STREAM_PLANE,
    Handshake,
    dialing,
    listening,
)

KEY = new_cluster_key()
STRANGE = new_cluster_key()


def talk(dialer: Handshake, listener: Handshake) -> list[bytes]:
    """Carries each one's frames to the other until both are content; what was said, in order."""
    assert next(listener) == b""
    said = [next(dialer)]
    said.append(listener.send(said[-1]))
    said.append(dialer.send(said[-1]))
    with pytest.raises(StopIteration) as admitted:
        listener.send(said[-1])
    said.append(admitted.value.value)
    with pytest.raises(StopIteration) as content:
        dialer.send(said[-1])
    assert content.value.value == b""
    return said


def listener(key: ClusterKey = KEY, plane: bytes = STREAM_PLANE) -> Handshake:
    handshake = listening(key, plane, "them")
    assert next(handshake) == b""
    return handshake


def test_both_prove_that_they_have_the_key_and_nobody_says_it() -> None:
    said = talk(dialing(KEY, STREAM_PLANE, "them"), listening(KEY, STREAM_PLANE, "them"))
    assert not any(KEY.secret.reveal().encode() in frame for frame in said)
    assert len(set(said)) == 4


def test_a_dialer_with_another_key_is_turned_away_without_a_proof_of_ours() -> None:
    dialer, ours = dialing(STRANGE, STREAM_PLANE, "them"), listener()
    proof = dialer.send(ours.send(next(dialer)))
    with pytest.raises(ProtocolError, match="has another cluster key"):
        ours.send(proof)


def test_a_listener_with_another_key_is_not_believed() -> None:
    dialer = dialing(KEY, STREAM_PLANE, "them")
    next(dialer)
    dialer.send(secrets.token_bytes(NONCE_BYTES))
    with pytest.raises(ProtocolError, match="has another cluster key"):
        dialer.send(secrets.token_bytes(32))


def test_a_recorded_handshake_is_worth_nothing_later() -> None:
    said = talk(dialing(KEY, STREAM_PLANE, "them"), listening(KEY, STREAM_PLANE, "them"))
    again = listener()
    assert again.send(said[0]) != said[1]
    with pytest.raises(ProtocolError, match="has another cluster key"):
        again.send(said[2])
    dialer = dialing(KEY, STREAM_PLANE, "them")
    next(dialer)
    dialer.send(said[1])
    with pytest.raises(ProtocolError, match="has another cluster key"):
        dialer.send(said[3])


def test_what_a_dialer_says_proves_nothing_when_it_is_sent_back_to_it() -> None:
    """An impostor who answers with the dialer's own nonce and then with its own proof."""
    dialer = dialing(KEY, STREAM_PLANE, "them")
    nonce = next(dialer).removeprefix(MAGIC)
    proof = dialer.send(nonce)
    with pytest.raises(ProtocolError, match="has another cluster key"):
        dialer.send(proof)


def test_a_listener_cannot_be_made_to_answer_its_own_question() -> None:
    """An impostor opens a second connection and hands our question on to us; we prove only to who has proved."""
    ours, second = listener(), listener()
    question = ours.send(MAGIC + secrets.token_bytes(NONCE_BYTES))
    answer = second.send(MAGIC + question)
    with pytest.raises(ProtocolError, match="has another cluster key"):
        ours.send(answer)


def test_a_proof_for_one_plane_is_none_for_another() -> None:
    dialer, ours = dialing(KEY, STREAM_PLANE, "them"), listener(plane=KV_PLANE)
    proof = dialer.send(ours.send(next(dialer)))
    with pytest.raises(ProtocolError, match="has another cluster key"):
        ours.send(proof)


@pytest.mark.parametrize(
    "first",
    [b"", MAGIC, MAGIC + bytes(NONCE_BYTES - 1), MAGIC + bytes(NONCE_BYTES + 1), bytes(40), b"GET / HTTP/1.1\r\n\r\n"],
)
def test_who_does_not_begin_as_agreed_hears_nothing(first: bytes) -> None:
    with pytest.raises(ProtocolError, match="does not know how to show the cluster key"):
        listener().send(first)


@pytest.mark.parametrize("proof", [b"", bytes(31), bytes(32), bytes(33)])
def test_a_cut_or_stretched_proof_is_refused(proof: bytes) -> None:
    ours = listener()
    ours.send(MAGIC + bytes(NONCE_BYTES))
    with pytest.raises(ProtocolError, match="has another cluster key"):
        ours.send(proof)


def test_what_is_derived_from_a_key_differs_by_purpose_and_key() -> None:
    derived = {key.derive(purpose).reveal() for key in (KEY, STRANGE) for purpose in ("nats", "worker calls")}
    assert len(derived) == 4
    assert not any(key.secret.reveal() in text for key in (KEY, STRANGE) for text in derived)
