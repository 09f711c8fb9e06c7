"""The order of one worker's event batches: what may be applied now, and what is missing. No I/O here."""

from collections.abc import Iterator

from baton_proto.kv_events import KvEventBatch

MAX_PENDING = 4096  # batches that wait for an earlier one; beyond it only a snapshot helps


class EventFeed:
    def __init__(self) -> None:
        self.applied = 0  # id of the last batch that was handed out, or that the snapshot contained
        self.expected = 0  # highest id that the worker is known to have published
        self._pending: dict[int, KvEventBatch] = {}

    def offer(self, batch: KvEventBatch) -> bool:
        """Takes a batch. Returns False when it was there before."""
        self.expected = max(self.expected, batch.event_id)
        if batch.event_id <= self.applied or batch.event_id in self._pending:
            return False
        if len(self._pending) >= MAX_PENDING:
            self._pending.clear()
        self._pending[batch.event_id] = batch
        return True

    def ready(self) -> Iterator[KvEventBatch]:
        """Takes out the batches whose turn it is."""
        while (batch := self._pending.pop(self.applied + 1, None)) is not None:
            self.applied = batch.event_id
            yield batch

    @property
    def behind(self) -> bool:
        """A batch was published that was not handed out yet; it may be on its way."""
        return self.applied < self.expected

    @property
    def holed(self) -> bool:
        """A batch waits for one that should have come before it."""
        return bool(self._pending)

    @property
    def missing(self) -> range:
        """Ids that must come before anything else can be handed out."""
        return range(self.applied + 1, min(self._pending, default=self.expected + 1))

    def rebase(self, event_id: int) -> None:
        """A snapshot contained everything up to `event_id`."""
        self.applied = event_id
        self._pending = {known: batch for known, batch in self._pending.items() if known > event_id}
        self.expected = max(self._pending, default=event_id)
