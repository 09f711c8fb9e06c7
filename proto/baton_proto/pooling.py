"""What a model gives of a prompt where it generates no text: an embedding, or a score of two texts."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from baton_proto.decoding import Name, Packed, Rows

GENERATE: Final = "generate"
EMBED: Final = "embed"
SCORE: Final = "score"

PooledText = Annotated[str, Meta(max_length=2**24)]


class Pooling(Struct, frozen=True):
    task: Name  # EMBED or SCORE
    texts: Annotated[list[PooledText], Rows] = []  # the two of a score, of which the server makes the tokens
    fields: Packed = b"{}"  # a JSON object: more that the server shall know, in its own words
