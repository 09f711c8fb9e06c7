"""Forms, however they are cut into pieces."""

import pytest

from router.api.batches.form import MAX_FIELD_BYTES, Form
from runtime.errors import InvalidRequestError

TYPE = "multipart/form-data; boundary=cut"
CONTENT = b"one\r\n--cu\r\n--cutter\r\n\r\n--cut two\x00\xff\r\n"


def form_of(content: bytes, purpose: bytes = b"batch") -> bytes:
    return b"".join(
        (
            b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose,
            b'\r\n--cut\r\ncontent-disposition: form-data; name="file"; filename="a \xc3\xa4.jsonl"\r\n',
            b"Content-Type: application/octet-stream\r\n\r\n" + content,
            b"\r\n--cut--\r\nand so is what follows",
        )
    )


def read(data: bytes, size: int, content_type: str = TYPE) -> tuple[Form, bytes]:
    content = bytearray()
    form = Form(content_type, content.extend)
    for start in range(0, len(data), size):
        form.feed(data[start : start + size])
    return form, bytes(content)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
@pytest.mark.parametrize("content", [b"", b"{}\n" * 50, b"\r\n", b"\r\n--cu"])
def test_a_form_is_read_whatever_its_pieces(size: int, content: bytes) -> None:
    form, found = read(form_of(content), size)
    assert (found, form.filename, form.fields, form.is_whole) == (content, "a ä.jsonl", {"purpose": "batch"}, True)


@pytest.mark.parametrize("size", [1, 10_000])
def test_what_is_like_a_boundary_and_none_is_refused_and_a_cut_form_has_no_end(size: int) -> None:
    with pytest.raises(InvalidRequestError, match="body: is no form"):
        read(form_of(CONTENT), size)
    form, _ = read(form_of(b"{}")[:-40], size)
    assert not form.is_whole


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", "text/plain; boundary=cut"])
def test_a_body_that_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequestError, match="content-type: must be multipart/form-data"):
        read(form_of(b""), 100, content_type)


def test_long_fields_long_heads_and_many_parts_are_refused() -> None:
    part = b'\r\n--cut\r\ncontent-disposition: form-data; name="x"\r\n\r\n'
    with pytest.raises(InvalidRequestError, match="purpose: is too long"):
        read(form_of(b"", b"b" * (MAX_FIELD_BYTES + 1)), 100)
    for data in (part * 20, part[:10] + b"x" * 10_000):
        with pytest.raises(InvalidRequestError, match=r"body: is (a form of more than 16 parts|no form)"):
            read(data, 100)
