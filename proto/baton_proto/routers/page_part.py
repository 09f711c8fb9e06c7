"""What one router adds to the live page of another: the answer to the question `page`."""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Count, Name, Packed, Rows, Small, versioned
from baton_proto.routers.router_report import RouterTotals

MAJOR = 1


class WorkerFlow(Struct, frozen=True, array_like=True):
    """What has gone through a worker, as this router saw it."""

    worker_id: Name
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count


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
    flows: Annotated[list[WorkerFlow], Rows] = []  # this and the next: only where somebody watches the page
    lines: Packed = b""  # the last requests, as the page wants them


encode_page_part: Callable[[PagePart], bytes] = msgspec.msgpack.Encoder().encode
decode_page_part = versioned(PagePart, "page part", MAJOR)
