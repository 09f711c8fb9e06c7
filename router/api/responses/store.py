"""Responses that may be gone on from: in this router's memory, for a time and within a number of bytes. Any thread may
ask."""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from msgspec import Struct

from router.text.chat_template import Message

LEAST_BYTES = 4096  # that one response counts, so that small ones are bounded in number
BYTES_PER_CHAR = 4
BYTES_PER_OBJECT = 640  # of a message or call, beside its texts
BYTES_PER_ARGUMENT_CHAR = 24  # of a call's JSON as Python objects: a list takes 64 bytes and is written in 3 characters


class Stored(Struct, frozen=True):
    tenant: str
    messages: Sequence[Message]  # the conversation with the answer, without instructions
    argument_chars: int  # of the calls in it
    body: bytes  # the response as JSON
    num_bytes: int
    expires_s: float  # by the store's clock


class ResponseStore:
    def __init__(self, limit_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_bytes`: 0 keeps nothing."""
        self.limit_bytes = limit_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, Stored] = OrderedDict()  # the oldest first, which is the first to expire
        self._ids: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)  # of each tenant
        self._tenant_bytes: defaultdict[str, int] = defaultdict(int)
        self.num_bytes = 0

    def get(self, response_id: str, tenant: str) -> Stored | None:
        with self._lock:
            self._expire()
            stored = self._by_id.get(response_id)
        return stored if stored is not None and stored.tenant == tenant else None

    def put(self, response_id: str, tenant: str, messages: Sequence[Message], argument_chars: int, body: bytes) -> None:
        """A response that is larger than the limit is not kept. For others to have room, the tenant that has most here
        loses its oldest."""
        num_bytes = max(LEAST_BYTES, _message_bytes(messages, argument_chars) + len(body))
        if num_bytes > self.limit_bytes:
            return
        stored = Stored(tenant, messages, argument_chars, body, num_bytes, self._clock() + self.ttl_s)
        with self._lock:
            self._expire()
            while self.num_bytes + num_bytes > self.limit_bytes:
                most = max(self._tenant_bytes, key=lambda each: self._tenant_bytes[each])
                self._drop(next(iter(self._ids[most])))
            self._by_id[response_id] = stored
            self._ids[tenant][response_id] = None
            self._tenant_bytes[tenant] += num_bytes
            self.num_bytes += num_bytes

    def delete(self, response_id: str, tenant: str) -> bool:
        """False: there is none."""
        with self._lock:
            stored = self._by_id.get(response_id)
            found = stored is not None and stored.tenant == tenant
            if found:
                self._drop(response_id)
            return found

    def _expire(self) -> None:
        now_s = self._clock()
        while self._by_id and next(iter(self._by_id.values())).expires_s <= now_s:
            self._drop(next(iter(self._by_id)))

    def _drop(self, response_id: str) -> None:
        stored = self._by_id.pop(response_id)
        del self._ids[stored.tenant][response_id]
        self._tenant_bytes[stored.tenant] -= stored.num_bytes
        self.num_bytes -= stored.num_bytes
        if not self._ids[stored.tenant]:
            del self._ids[stored.tenant], self._tenant_bytes[stored.tenant]


def _message_bytes(messages: Sequence[Message], argument_chars: int) -> int:
    """At most what the messages take in memory."""
    objects = sum(1 + len(message.get("tool_calls", ())) for message in messages)
    chars = sum(len(message["content"]) + len(message.get("reasoning_content", "")) for message in messages)
    return BYTES_PER_OBJECT * objects + BYTES_PER_CHAR * chars + BYTES_PER_ARGUMENT_CHAR * argument_chars
