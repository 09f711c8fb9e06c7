"""The order of one worker's batches in a log that is read from its start: the stream's history or a recording.

A log, unlike a live worker, is complete: a batch that is missing when REORDER_BATCHES more have been read, or at the
end, will not come and is passed over. No I/O here.
"""

from collections.abc import Iterator

from baton_proto.kv_events import KvEventBatch
from runtime.kv_events.feed import EventFeed

REORDER_BATCHES = 1024  # publishers have fewer on their way at a time


class StoredFeed:
    def __init__(self) -> None:
        self.num_missing = 0  # batches that were passed over, those before the log's first one included
        self._feed = EventFeed()

    @property
    def applied(self) -> int:
        """Id of the last batch that was handed out, or that the snapshot contained."""
        return self._feed.applied

    def rebase(self, event_id: int) -> None:
        """A snapshot contained everything up to `event_id`."""
        self._feed.rebase(event_id)

    def offer(self, batch: KvEventBatch) -> Iterator[KvEventBatch]:
        """The batches whose turn has come; none for a batch that was there before."""
        if self._feed.offer(batch):
            yield from self._feed.ready()
        while self._feed.holed and self._feed.expected - self._feed.applied > REORDER_BATCHES:
            yield from self._pass_over()

    def end(self) -> Iterator[KvEventBatch]:
        """The log has ended: the batches that still wait for a missing one."""
        while self._feed.holed:
            yield from self._pass_over()

    def _pass_over(self) -> Iterator[KvEventBatch]:
        missing = self._feed.missing
        self.num_missing += len(missing)
        self._feed.rebase(missing.stop - 1)
        return self._feed.ready()
