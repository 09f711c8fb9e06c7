import pytest

from runtime.errors import ProtocolError
from runtime.streams.length_prefix import PREFIX_BYTES, body_bytes, framed


def test_a_frame_is_the_length_in_little_endian_and_the_body() -> None:
    assert framed(b"abc") == b"\x03\0\0\0abc"
    assert framed(b"") == bytes(PREFIX_BYTES)


def test_the_length_is_read_at_an_offset() -> None:
    assert body_bytes(b"??" + framed(b"abc"), 3, "a peer", offset=2) == 3


def test_a_length_above_the_limit_is_the_peers_fault() -> None:
    with pytest.raises(ProtocolError, match="a peer: announces 4 bytes; a message has 3 at most"):
        body_bytes(framed(b"abcd"), 3, "a peer")
