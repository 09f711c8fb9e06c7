"""The images of a prompt, which a server makes tokens of."""

from collections.abc import Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct

from baton_proto.decoding import Name, Packed, Rows, Small

MAX_URLS: Final = 2**25  # characters of all those of a prompt: half of what a stream takes at once

Url = Annotated[str, Meta(max_length=MAX_URLS)]


class Image(Struct, frozen=True):
    """An image and the tokens that it is in a prompt. Until a server has made its tokens they are its `mark`."""

    name: Name  # SHA-256 of its bytes
    url: Url  # data:, with its bytes
    offset: Small = 0
    length: Small = 0
    mark: Annotated[list[Small], Rows] = []  # what the chat template writes, of which the server makes the tokens


class Seen(Struct, frozen=True):
    """A prompt as the server has it, which has put the images in."""

    token_ids: Packed  # u32 LE
    places: Annotated[list[tuple[Small, Small]], Rows]  # (offset, length) of each image


def unplaced(tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
    """The prompt as the chat template wrote it, from which a server makes the images' tokens."""
    written: list[int] = []
    end = 0
    for image in images:
        written += [*tokens[end : image.offset], *image.mark]
        end = image.offset + image.length
    return [*written, *tokens[end:]]
