"""Responses that may be gone on from: in this router's memory, for a time and within a number of bytes. Any thread may
ask, but for what other routers hold.

A conversation lies here from the time that its answer begins, and nowhere else, so that the limit holds for what is
being answered, too.
"""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable

from msgspec import Struct
from msgspec.structs import replace

from router.text.chat_template import Message

TTL_S = 3600.0  # a conversation that rests for longer begins anew; memory bounds the store in any case
LEAST_BYTES = 4096  # that one response counts, so that small ones are bounded in number


class Conversation(Struct, frozen=True):
    """Messages, without instructions."""

    messages: list[Message] = []
    argument_chars: int = 0  # of the calls in it
    num_bytes: int = 0  # of memory that the messages take

    def __add__(self, more: "Conversation") -> "Conversation":
        return Conversation(
            [*self.messages, *more.messages],
            self.argument_chars + more.argument_chars,
            self.num_bytes + more.num_bytes,
        )


class Stored(Struct, frozen=True):
    tenant: str
    conversation: Conversation
    body: bytes  # the response as JSON; empty: it is being answered
    expires_s: float  # by the store's clock

    @property
    def num_bytes(self) -> int:
        return max(LEAST_BYTES, self.conversation.num_bytes + len(self.body))


class ResponseStore:
    def __init__(self, limit_bytes: int, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic) -> None:
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
            if stored is None or stored.tenant != tenant or stored.expires_s <= self._clock():
                return None
        return stored if stored.body else None

    def begin(self, response_id: str, tenant: str, asked: Conversation) -> Stored:
        """The response is being answered, perhaps again, for a client that goes on from an event. One that is larger
        than the limit is not kept. For others to have room, the tenant that has most here loses its oldest."""
        with self._lock:
            self._expire()
            if response_id in self._by_id:
                self._drop(response_id)
            begun = Stored(tenant, asked, b"", self._clock() + self.ttl_s)
            self._put(response_id, begun)
            return begun

    def finish(self, response_id: str, said: Conversation, body: bytes) -> Stored | None:
        """The response is complete. Nothing is kept of one that has lost its place."""
        with self._lock:
            self._expire()
            if (stored := self._by_id.get(response_id)) is None:
                return None
            self._drop(response_id)
            whole = stored.conversation + said
            expires_s = self._clock() + self.ttl_s
            self._put(response_id, replace(stored, conversation=whole, body=body, expires_s=expires_s))
            return self._by_id.get(response_id)

    def adopt(self, response_id: str, tenant: str, whole: Conversation, body: bytes, left_s: float) -> None:
        """Keeps another router's response for `left_s`."""
        with self._lock:
            self._expire()
            if response_id not in self._by_id:
                self._put(response_id, Stored(tenant, whole, body, self._clock() + left_s))

    def forget_unanswered(self, response_id: str, begun: Stored) -> None:
        """Nobody goes on with what has `begun`."""
        with self._lock:
            if self._by_id.get(response_id) is begun:
                self._drop(response_id)

    def delete(self, response_id: str, tenant: str) -> bool:
        """Forgets a response. False: the tenant has none of this id."""
        with self._lock:
            stored = self._by_id.get(response_id)
            found = stored is not None and stored.tenant == tenant and bool(stored.body)
            if found:
                self._drop(response_id)
            return found

    def drop(self, response_id: str) -> None:
        """Forgets a response that another router was told to forget."""
        with self._lock:
            if response_id in self._by_id:
                self._drop(response_id)

    # --- what other routers hold: a router alone has none ------------------------------------------------------------

    def save(self, response_id: str, stored: Stored) -> Awaitable[None] | None:
        """Stores a complete response where other routers find it. The result raises nothing; None: there are none."""
        return None

    async def find(self, response_id: str, tenant: str) -> bool:
        """Whether the response is here now, after other routers' were looked through."""
        return False

    async def forget(self, response_id: str) -> None:
        """The response was deleted here, and is to be wherever else it is."""

    def _put(self, response_id: str, stored: Stored) -> None:
        if stored.num_bytes > self.limit_bytes:
            return
        while self.num_bytes + stored.num_bytes > self.limit_bytes:
            most = max(self._tenant_bytes, key=lambda each: self._tenant_bytes[each])
            self._drop(next(iter(self._ids[most])))
        self._by_id[response_id] = stored
        self._ids[stored.tenant][response_id] = None
        self._tenant_bytes[stored.tenant] += stored.num_bytes
        self.num_bytes += stored.num_bytes

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
