"""The page of two routers: what each has counted is added up, and a request's story is found where it ran."""

import json

from baton_proto.token_counts import TokenCounts
from router.counters.tally import RequestTally
from router.siblings import Siblings
from router.ui.parts import PageParts, flows_of, lines_of, queue_of, totals_of
from router.ui.requests import RequestLine, RequestViews
from runtime.nats.client import NatsClient
from tests.router.ui.crowd import Crowd, NothingExplained

NAME = RequestLine.__struct_fields__.index("request_id")
NAMES = ["router-1", "router-2"]


async def test_any_router_shows_the_queue_counts_and_requests_of_all(nats: NatsClient) -> None:
    crowds, parts = [], []
    for name in NAMES:
        crowd = Crowd(0, 1)
        views = RequestViews(crowd.metrics.recent, NothingExplained())  # type: ignore[arg-type]
        crowds.append(crowd)
        parts.append(PageParts(name, crowd.queue, crowd.metrics, views, Siblings(nats, name, lambda: NAMES)))
        await parts[-1].start()
    for number, crowd in enumerate((crowds[0], crowds[1], crowds[0])):
        with RequestTally(crowd.metrics, f"request-{number}", 5):
            pass
        crowd.metrics.totals.arrivals += 10
        crowd.metrics.totals.ttft[7] += 1
        crowd.metrics.flows["decode-1", 1] = TokenCounts(100, 50, 7)
    seen = await parts[1].all(watched=True)
    assert [part.router_id for part in seen] == ["router-2", "router-1"]
    with crowds[0].queue.admit():
        assert queue_of(seen).capacity == 128
    assert (totals_of(seen).arrivals, totals_of(seen).ttft[7]) == (30, 3)
    assert flows_of(seen)["decode-1"] == TokenCounts(200, 100, 14)
    times = {line.request_id: line.time_s for line in lines_of(seen)}
    assert times.keys() == {f"request-{number}" for number in range(3)}
    assert list(times.values()) == sorted(times.values(), reverse=True)
    for number in range(3):
        assert json.loads(await parts[1].story(f"request-{number}"))["line"][NAME] == f"request-{number}"
    assert await parts[1].story("nobody") == b""
    assert not lines_of(await parts[1].all(watched=False))
