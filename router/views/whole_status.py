"""What `baton status` shows of all routers together, and of all models: each one's status, merged into one."""

from collections.abc import Mapping, Sequence

from google.protobuf.message import DecodeError

from baton_proto.generated import inference_pb2 as pb
from baton_proto.token_counts import TOKEN_COUNTS
from router.siblings import Siblings
from router.views.status import StatusView

QUESTION = "status"
QUEUE = ("waiting", "running", "capacity")
TOTALS = (
    *("requests", *TOKEN_COUNTS),
    *("events_refused", "events_malformed", "event_gaps", "snapshots"),
)
"""Numbers that are summed. All others are the asked router's: trees are alike, and workers report to every router."""


class WholeStatus:
    def __init__(self, own: StatusView, siblings: Siblings) -> None:
        self._own = own
        self._siblings = siblings

    async def start(self) -> None:
        async def answer(_payload: bytes) -> bytes:
            return (await self._own.status()).SerializeToString()

        await self._siblings.answer(QUESTION, answer)

    async def status(self) -> pb.StatusResponse:
        others = []
        for answer in await self._siblings.ask(QUESTION):
            try:
                others.append(pb.StatusResponse.FromString(answer))
            except DecodeError:
                continue  # another release's
        return merged([await self._own.status(), *others])


def merged(views: Sequence[pb.StatusResponse]) -> pb.StatusResponse:
    """One status of what several routers say, in which a worker is as the first of them sees it, with a note where
    others see it otherwise."""
    if len(views) == 1:
        return views[0]
    whole = _summed(views, TOTALS)
    whole.routers.extend(sorted(view.router_id for view in views))
    for worker_id in sorted({worker.worker_id for view in views for worker in view.workers}):
        whole.workers.append(_worker(worker_id, views))
    return whole


def of_models(views: Mapping[str, pb.StatusResponse]) -> pb.StatusResponse:
    """One status of what one router says of each model."""
    if len(views) == 1:
        return next(iter(views.values()))
    whole = _summed([*views.values()], [name for name in pb.Totals.DESCRIPTOR.fields_by_name if name != "clock_s"])
    whole.routers.extend(sorted({router for view in views.values() for router in view.routers}))
    for model, view in views.items():
        for worker in view.workers:
            whole.workers.add(model=model).MergeFrom(worker)
    return whole


def _summed(views: Sequence[pb.StatusResponse], totals: Sequence[str]) -> pb.StatusResponse:
    """The first status with the sums of all, and without workers and routers. `totals`: those that are summed."""
    whole = pb.StatusResponse()
    whole.CopyFrom(views[0])
    del whole.workers[:], whole.routers[:]
    for view in views[1:]:
        _add(whole.queue, view.queue, QUEUE)
        _add(whole.totals, view.totals, totals)
        whole.queue.oldest_age_s = max(whole.queue.oldest_age_s, view.queue.oldest_age_s)
    return whole


def _worker(worker_id: str, views: Sequence[pb.StatusResponse]) -> pb.WorkerStatus:
    seen = {view.router_id: worker for view in views for worker in view.workers if worker.worker_id == worker_id}
    first, *others = seen.values()
    whole = pb.WorkerStatus()
    whole.CopyFrom(first)
    for other in others:
        if other.incarnation == first.incarnation:
            _add(whole, other, TOKEN_COUNTS)
    whole.used = len(seen) == len(views) and all(worker.used for worker in seen.values())
    notes = {view.router_id: _note(seen.get(view.router_id), first) for view in views}
    if len(set(notes.values())) > 1:
        whole.note = "; ".join(f"{router_id}: {note}" for router_id, note in notes.items() if note)
    return whole


def _note(worker: pb.WorkerStatus | None, first: pb.WorkerStatus) -> str:
    if worker is None:
        return "does not know it"
    state = "" if worker.state == first.state else f"takes it for {worker.state}"
    return "; ".join(words for words in (state, worker.note) if words)


def _add(whole: pb.QueueStatus | pb.Totals | pb.WorkerStatus, more: object, names: Sequence[str]) -> None:
    for name in names:
        setattr(whole, name, getattr(whole, name) + getattr(more, name))
