"""One status of several routers, and one that does not answer is left out of it."""

from baton_proto.generated import inference_pb2 as pb
from router.siblings import Siblings
from router.views.whole_status import QUESTION, merged
from runtime.nats.client import NatsClient


def seen_by(
    router_id: str, *workers: pb.WorkerStatus, requests: int = 0, oldest_age_s: float = 0.0
) -> pb.StatusResponse:
    queue = pb.QueueStatus(waiting=1, running=2, capacity=10, oldest_age_s=oldest_age_s)
    totals = pb.Totals(clock_s=requests, requests=requests, event_batches=7, tree_blocks=5)
    return pb.StatusResponse(router_id=router_id, workers=workers, queue=queue, totals=totals, routers=[router_id])


def worker(worker_id: str, state: str = "ready", note: str = "", tokens: int = 0) -> pb.WorkerStatus:
    return pb.WorkerStatus(worker_id=worker_id, state=state, note=note, running=3, output_tokens=tokens)


def test_what_each_router_counts_is_summed_and_what_all_see_is_told_once() -> None:
    views = [
        seen_by("b", worker("d", tokens=4), requests=3),
        seen_by("a", worker("d", tokens=5), requests=9, oldest_age_s=2),
    ]
    whole = merged(views)
    assert (whole.router_id, whole.routers) == ("b", ["a", "b"])
    assert whole.queue == pb.QueueStatus(waiting=2, running=4, capacity=20, oldest_age_s=2)
    assert whole.totals == pb.Totals(clock_s=3, requests=12, event_batches=7, tree_blocks=5)
    assert list(whole.workers) == [worker("d", tokens=9)]


def test_a_note_says_which_router_sees_a_worker_otherwise() -> None:
    views = [
        seen_by("a", worker("d"), worker("e"), worker("f", note="same")),
        seen_by("b", worker("e", "draining"), worker("f", note="same"), worker("g", note="more")),
    ]
    notes = {worker.worker_id: worker.note for worker in merged(views).workers}
    assert notes == {
        "d": "b: does not know it",
        "e": "b: takes it for draining",
        "f": "same",
        "g": "a: does not know it; b: more",
    }


def test_a_worker_is_used_when_every_router_uses_it() -> None:
    def of(*used: bool) -> list[pb.WorkerStatus]:
        return [pb.WorkerStatus(worker_id=f"{number}", used=one) for number, one in enumerate(used)]

    whole = merged([seen_by("a", *of(True, True, False, True)), seen_by("b", *of(True, False, True))])
    assert [worker.used for worker in whole.workers] == [True, False, False, False]


async def test_a_question_reaches_all_others_and_waits_for_none_that_has_gone(nats: NatsClient) -> None:
    names = {"a", "b", "c", "gone"}
    routers = {name: Siblings(nats, name, lambda: names) for name in sorted(names - {"gone"})}

    async def nothing(payload: bytes) -> bytes:
        return b""

    async def echo(payload: bytes) -> bytes:
        return b"b: " + payload

    await routers["a"].answer(QUESTION, echo)  # nobody asks itself
    await routers["b"].answer(QUESTION, echo)
    await routers["c"].answer(QUESTION, nothing)
    assert await routers["a"].ask(QUESTION, b"?") == [b"b: ?"]
