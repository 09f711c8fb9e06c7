"""A response that its caller may come back for, in the bucket `baton_<namespace>_responses`.

It is JSON, because msgpack has no large integers, which callers may write.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from baton_proto.decoding import Count, Name, versioned

MAJOR = 1


class SavedResponse(Struct, frozen=True):
    version: Count
    tenant: Name
    messages: Raw  # the conversation, without instructions: a list of objects
    argument_chars: Count  # of the calls in it
    num_bytes: Count  # of a router's memory that the messages take
    body: Raw  # the response
    until_s: Annotated[float, Meta(ge=0, le=2**53)]  # Unix time


encode_saved_response: Callable[[SavedResponse], bytes] = msgspec.json.Encoder().encode
decode_saved_response = versioned(SavedResponse, "saved response", MAJOR, json=True)
