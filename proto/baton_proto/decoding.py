"""How bytes become messages, and the bounds of what is in them."""

from collections.abc import Callable
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from baton_proto.version import check_major

# Invariant: a message that was decoded can be added up, sent on and shown. The sum of a thousand counts fits an int64.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # tokens of a sequence, blocks of a slab: what others hold in 32 bits
MAX_MS = 1e6
Ms = Annotated[float, Meta(ge=0, le=MAX_MS)]  # neither infinite nor NaN
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Hash = Annotated[int, Meta(ge=0)]  # u64: msgpack has no larger integers

MAX_NAME: Final = 256
MAX_TEXT: Final = 64 * 1024
Name = Annotated[str, Meta(max_length=MAX_NAME)]  # an id, an address, a word
Text = Annotated[str, Meta(max_length=MAX_TEXT)]  # for people
Packed = Annotated[bytes, Meta(max_length=2**26)]  # token ids or hashes: as much as a stream takes at once
Rows = Meta(max_length=2**20)  # of a list or mapping: more than any honest message has


def decoder(types: Any, *, json: bool = False) -> Callable[[bytes | bytearray], Any]:
    """A function from bytes to one of the messages `types`, which raises msgspec.DecodeError for anything else."""
    decode = (msgspec.json if json else msgspec.msgpack).Decoder(types).decode

    def decode_message(data: bytes | bytearray) -> Any:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:  # msgspec passes these on
            raise msgspec.DecodeError(str(error)) from error

    return decode_message


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


class _Head(Struct):
    version: Count


M = TypeVar("M", bound=Versioned)


def versioned(kind: type[M], name: str, major: int, *, json: bool = False) -> Callable[[bytes | bytearray], M]:
    """Like `decoder`, for a message that says its version. Another major one raises VersionError, with `name`, whatever
    else is in it."""
    decode, decode_head = decoder(kind, json=json), decoder(_Head, json=json)

    def decode_message(data: bytes | bytearray) -> M:
        try:
            message: M = decode(data)
        except msgspec.DecodeError:
            check_major(name, decode_head(data).version, major)
            raise
        check_major(name, message.version, major)
        return message

    return decode_message
