"""What one router adds to the live page of another: the answer to the question `page`."""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Count, Name, Packed, Rows, Small, versioned
from baton_proto.routers.router_report import RouterTotals
from baton_proto.token_counts import TokenCounts

MAJOR = 1


class PagePart(Struct, frozen=True):
    version: Count
    router_id: Name
    incarnation: Count
    waiting: Small
    running: Small
    capacity: Small
    oldest_s: Annotated[float, Meta(ge=0)]
    totals: RouterTotals
    streamed_tokens: Count
    flows: Annotated[list[tuple[Name, TokenCounts]], Rows] = []  # by worker; this and the next: where somebody watches
    lines: Packed = b""  # the last requests, as the page wants them


encode_page_part: Callable[[PagePart], bytes] = msgspec.msgpack.Encoder().encode
decode_page_part = versioned(PagePart, "page part", MAJOR)
