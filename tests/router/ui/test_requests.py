from baton_proto.worker import Failure
from router.counters.recent import MAX_REQUESTS
from router.counters.tally import RequestTally
from router.placement.cost import TERMS
from router.text.tokenizer import Tokenizer
from router.ui.parts import lines_of
from router.ui.requests import LISTED, RequestViews
from tests.router.scripted_worker import ScriptedWorker, answer, steps_of
from tests.router.small_router import PROMPT, collect, request, routing, stream, then_fail
from tests.router.ui.crowd import Crowd, NothingExplained
from tests.router.views.test_explain import explainer


async def test_a_story_says_where_a_request_went_why_and_when(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("p0", role="prefill"), ScriptedWorker("d0")) as router:
        wanted = request(10)
        await collect(stream(router, wanted))
        views = RequestViews(router.metrics.recent, explainer(router))
        story = views.story(wanted.request_id)
        assert story is not None
        line, (choice,), (placement,) = story["line"], story["choices"], story["placements"]
        assert (line.prompt_tokens, line.output_tokens, line.outcome) == (len(PROMPT), 10, "completed")
        assert (line.prefill_worker, line.decode_worker) == ("p0", "d0")
        assert (placement["prefill_worker"], placement["decode_worker"]) == ("p0", "d0")
        assert placement["reason"] == "shipped"
        assert [one["worker_id"] for one in placement["candidates"] if one["chosen"]] == ["p0", "d0"]
        assert all(len(one["terms"]) == len(story["terms"]) == len(TERMS) for one in placement["candidates"])
        assert (choice["kv_blocks"], choice["kv_bytes"], choice["transport"]) == (3, 300, "shm")
        passed = [placement["queued_ms"], placement["placed_ms"], choice["first_ms"], choice["last_ms"]]
        assert passed == sorted(passed)
        assert passed[-1] <= line.duration_ms
        assert views.lines() == [line]


async def test_a_story_has_every_attempt(tokenizer: Tokenizer) -> None:
    fails = steps_of(then_fail(3, Failure("internal", "broke", True, "d0")), answer)
    async with routing(tokenizer, ScriptedWorker("d0", script=fails), ScriptedWorker("d1", script=fails)) as router:
        wanted = request(10)
        await collect(stream(router, wanted))
        story = RequestViews(router.metrics.recent, explainer(router)).story(wanted.request_id)
        assert story is not None
        assert [placement["attempt"] for placement in story["placements"]] == [1, 2]
        first, second = (placement["placed_ms"] for placement in story["placements"])
        assert first <= story["choices"][0]["first_ms"] <= second


def test_the_callers_id_means_its_latest_request_and_an_unknown_one_nothing() -> None:
    crowd = Crowd(0, 1)
    for work_id in ("mine-00000001", "mine-00000002", "other-00000003"):
        with RequestTally(crowd.metrics, work_id, 5):
            pass
    views = RequestViews(crowd.metrics.recent, NothingExplained())  # type: ignore[arg-type]
    story = views.story("mine")
    assert story is not None
    assert story["line"].request_id == "mine-00000002"
    assert views.story("mine-00000001") is not None
    assert views.story("nobody") is None


async def test_no_more_requests_are_remembered_and_listed_than_bounds_say() -> None:
    crowd = Crowd(0, 1)
    for number in range(MAX_REQUESTS + 10):
        with RequestTally(crowd.metrics, f"r{number}", 5):
            pass
    assert len(crowd.metrics.recent.requests) == MAX_REQUESTS
    assert [line.request_id for line in lines_of(await crowd.parts.all(watched=True))] == [
        f"r{MAX_REQUESTS + 9 - number}" for number in range(LISTED)
    ]
