"""How bytes become messages, and the bounds of the integers in them."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

# Invariant: a message that was decoded can be added up, sent on and shown. The sum of a thousand counts fits an int64.
Count = Annotated[int, Meta(ge=0, le=2**53)]
Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # tokens of a sequence, blocks of a slab: what others hold in 32 bits
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Hash = Annotated[int, Meta(ge=0)]  # u64: msgpack has no larger integers


def decoder(types: Any, *, json: bool = False) -> Callable[[bytes | bytearray], Any]:
    """A function from bytes to one of the messages `types`, which raises msgspec.DecodeError for anything else."""
    decode = (msgspec.json if json else msgspec.msgpack).Decoder(types).decode

    def decode_message(data: bytes | bytearray) -> Any:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError) as error:  # msgspec passes these on
            raise msgspec.DecodeError(str(error)) from error

    return decode_message
