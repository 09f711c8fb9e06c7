"""Images among the parts of a content, in any dialect: each leaves a SLOT in the text."""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from baton_proto.images import Image
from router.text.chat_template import SLOT
from runtime.errors import InvalidRequestError

MAX_IMAGES = 64  # of a message; router.max_body_bytes bounds their bytes
MAX_ADDRESS_CHARS = 4096
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
_FAR = re.compile(r"https?://", re.IGNORECASE)
_BEGINNING = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|BM|II\*\0|MM\0\*|RIFF.{4}WEBP|.{4}ftyp(?:avif|heic|mif1)", re.DOTALL
)
FORM = "must be data:image/TYPE;base64, and the image's bytes, or an address of http or https"
NO_IMAGE = "is no image: its bytes begin as PNG, JPEG, GIF, BMP, TIFF, WebP, AVIF and HEIC do not"

Part = TypeVar("Part", bound=msgspec.Struct)
UrlOf = Callable[[Any], object]
"""The URL of a part that is an image; None: it is none."""


class FarImage(Image, frozen=True):
    """An image by address, without a name until it is fetched."""

    where: str = ""  # the caller's name of its field


def with_slots(
    where: str, role: str, content: str | Sequence[Part], url_of: UrlOf
) -> tuple[str | Sequence[Part], list[Image]]:
    """The content with texts in the place of images, which users alone show. Raises InvalidRequestError."""
    if role != "user" or isinstance(content, str):
        return content, []
    images: list[Image] = []
    texts: list[Any] = []
    for i, part in enumerate(content):
        url = url_of(part)
        if url is not None:
            images.append(image_of(f"{where}[{i}]", url, len(images)))
        texts.append(part if url is None else replace(part, type="text", text=SLOT))
    return texts, images


def with_images(where: str, text: str, images: Sequence[Image]) -> dict[str, Any]:
    """The content of a message, whose texts stand on lines of their own, but not around an image. Raises
    InvalidRequestError."""
    if not images:
        return {"content": text}
    text = text.replace(f"{SLOT}\n", SLOT).replace(f"\n{SLOT}", SLOT)
    if text.count(SLOT) != len(images):
        raise InvalidRequestError(where, f"has the noncharacters {SLOT!r}: leave them out")
    return {"content": text, "images": images}


def image_of(where: str, url: object, earlier: int = 0) -> Image:
    """`earlier`: images of the message. Raises InvalidRequestError."""
    if earlier == MAX_IMAGES:
        raise InvalidRequestError(where, f"is one image too many: a message has {MAX_IMAGES} at most")
    if isinstance(url, str) and _FAR.match(url):
        if len(url) > MAX_ADDRESS_CHARS:
            raise InvalidRequestError(where, f"is an address of {len(url)} characters; at most {MAX_ADDRESS_CHARS}")
        return FarImage("", url, where=where)
    head = _DATA.match(url) if isinstance(url, str) else None
    if head is None or not isinstance(url, str):
        raise InvalidRequestError(where, FORM)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(where, f"{FORM}; {error}") from error
    return _named(where, url, data)


def image_of_bytes(where: str, kind: str, data: bytes) -> Image:
    """`kind`: its content type. Any thread. Raises InvalidRequestError."""
    return _named(where, f"data:{kind};base64,{base64.b64encode(data).decode()}", data)


def _named(where: str, url: str, data: bytes) -> Image:
    """Decoders of rare formats, which are the less tried ones, get nothing to read."""
    if not _BEGINNING.match(data):
        raise InvalidRequestError(where, NO_IMAGE)
    return Image(hashlib.sha256(data).hexdigest(), url)
