"""Workers of two generations in one service: no prompt is shipped from one to the other, and no answer that one of them
has begun goes on at the other."""

import asyncio
import math
import random
from typing import Any

import pytest
from msgspec.structs import replace

from baton_proto.discovery import weights_tag
from baton_proto.worker import Submit
from router.placement import assignment, placement
from router.placement.candidates import Request
from router.placement.one_generation import best_generation, of_each_generation
from router.placement.placement import Weighing
from router.placement.weights import Weights
from router.requests.request import Piece
from router.text.tokenizer import Tokenizer
from router.workers.pool import Generation
from runtime.discovery.directory import Change
from runtime.errors import UnavailableError
from tests.router.candidates import Candidate, weigh
from tests.router.scripted_worker import ScriptedWorker, answer, answer_until, greedy
from tests.router.small_router import CONFIG, PROMPT, collect, fails_with, request, routing, stream


def worker(name: str, kv_form: str) -> ScriptedWorker:
    made = ScriptedWorker(name, "prefill" if name.startswith("p") else "decode")
    made.kv_form = kv_form
    return made


async def test_a_prompt_is_shipped_between_workers_of_one_form_alone(tokenizer: Tokenizer) -> None:
    workers = [worker(f"{role}-{form}", form) for role in ("p", "d") for form in ("old", "new")]
    async with routing(tokenizer, *workers) as router:
        pairs = set()
        for number in range(8):
            leaving = workers[2 + number % 2]  # busy, so that the other one is cheaper
            charge = router.ledger.charge("other", (leaving.worker_id, 1), None, 40, 40)
            (served,) = (await collect(stream(router, request(3)))).finished.served_by
            pairs.add((served.prefill_worker, served.decode_worker, served.attempts))
            charge.release()
        assert pairs == {("p-old", "d-old", 1), ("p-new", "d-new", 1)}
        router.check_idle()


async def test_a_decode_worker_with_whose_form_nobody_ships_runs_its_prompts(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, worker("p-old", "old"), worker("d-new", "new")) as router:
        result = await collect(stream(router, request(3)))
        assert result.tokens == {0: greedy(PROMPT, 3)}
        (served,) = result.finished.served_by
        assert (served.prefill_worker, served.attempts) == ("", 1)


async def test_one_of_two_decode_workers_that_takes_no_kv_runs_its_prompts(tokenizer: Tokenizer) -> None:
    workers = worker("p-1", "float32"), worker("d-takes", "float32"), worker("d-alone", "float32 alone")
    async with routing(tokenizer, *workers) as router:
        pairs = set()
        for leaving in workers[1:]:  # busy, so that the other one is cheaper
            charge = router.ledger.charge("other", (leaving.worker_id, 1), None, 400, 400)
            (served,) = (await collect(stream(router, request(3)))).finished.served_by
            pairs.add((served.prefill_worker, served.decode_worker))
            charge.release()
        assert pairs == {("p-1", "d-takes"), ("", "d-alone")}


async def test_forms_do_not_matter_where_nobody_ships(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, worker("d-old", "old"), worker("d-new", "new")) as router:
        assert [generation.others for generation in router.pool.generations()] == [frozenset()]
        assert (await collect(stream(router, request(3)))).tokens == {0: greedy(PROMPT, 3)}


def test_the_form_that_is_in_time_is_taken_although_another_one_costs_less() -> None:
    rows = [Candidate(("cheap", 1), 399, 12000, 0), Candidate(("soon", 1), 0, 3120, 0)]  # cached blocks, queued tokens

    facts = Request(6400, 16)
    others = [Generation(1, frozenset([row.worker])) for row in rows]
    chosen = {}
    for due_ms in (math.inf, 222.0, 1.0):
        forms = of_each_generation(facts, others)
        weighings = [weigh(form, rows, [], Weights(), random.Random(1), due_ms=due_ms) for form in forms]
        best = best_generation(weighings, due_ms).placement()
        assert best is not None
        chosen[due_ms] = best.decode
    assert chosen == {math.inf: ("cheap", 1), 222.0: ("soon", 1), 1.0: ("soon", 1)}


def of_weights(name: str, weights: str, num_tokens: int | None = None) -> ScriptedWorker:
    """Dies in the middle of an answer, after `num_tokens`; None: it does not."""

    async def dies(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, num_tokens)
        await asyncio.sleep(0)
        await worker.die()

    made = ScriptedWorker(name, "prefill" if name.startswith("p") else "decode", answer if num_tokens is None else dies)
    made.model_hash = weights
    return made


async def test_workers_of_both_weights_serve_each_with_prefill_workers_of_its_own(tokenizer: Tokenizer) -> None:
    workers = [of_weights(f"{role}-{weights}", weights) for role in ("p", "d") for weights in ("a", "b")]
    async with routing(tokenizer, *workers, of_weights("p-c", "c")) as router:
        pairs = set()
        for leaving in workers[2:]:  # busy, so that the other one is cheaper
            charge = router.ledger.charge("other", (leaving.worker_id, 1), None, 400, 400)
            (served,) = (await collect(stream(router, request(3)))).finished.served_by
            pairs.add((served.prefill_worker, served.decode_worker))
            charge.release()
        assert pairs == {("p-a", "d-a"), ("p-b", "d-b")}
        assert [name for name, worker in router.pool.workers.items() if router.pool.is_unpaired(worker)] == ["p-c"]


async def test_an_answer_goes_on_with_the_weights_that_it_was_begun_with(tokenizer: Tokenizer) -> None:
    first, other, same = of_weights("d-1", "a", 3), of_weights("d-2", "b"), of_weights("d-3", "a")
    patient = replace(CONFIG, no_worker_timeout_s=60.0)
    async with routing(tokenizer, first, config=patient) as router, other, same:
        pieces = stream(router, request(8))
        begun = await anext(pieces)
        assert isinstance(begun, Piece)
        router.pool.apply(Change("removed", first.record()))
        await router.add(other)
        fresh = await collect(stream(router, request(2)))
        assert fresh.finished.served_by[0].decode_worker == "d-2", "a request that begins takes whoever is there"
        await router.add(same)
        rest = await collect(pieces)
        assert begun.token_ids + rest.tokens[0] == greedy(PROMPT, 8)
        assert rest.finished.served_by[0].decode_worker == "d-3"
        assert [submit.weights for submit in same.submits] == [weights_tag("a")]
        assert len(other.submits) == 1


async def test_an_answer_whose_weights_are_gone_fails_and_one_without_a_token_begins_again(
    tokenizer: Tokenizer,
) -> None:
    async with routing(tokenizer, of_weights("d-1", "a", 0), of_weights("d-2", "b")) as router:
        charge = router.ledger.charge("other", ("d-2", 1), None, 400, 400)
        result = await collect(stream(router, request(4)))
        assert (result.tokens[0], result.finished.served_by[0].attempts) == (greedy(PROMPT, 4), 2)
        charge.release()
    begun, other = of_weights("d-1", "a", 3), of_weights("d-2", "b")
    async with routing(tokenizer, begun, other) as router:
        charge = router.ledger.charge("other", ("d-2", 1), None, 400, 400)
        with fails_with(UnavailableError, r"has the weights that the answer was begun with was ready for 0\.3 s"):
            await collect(stream(router, request(8)))
        assert not other.submits
        charge.release()


async def test_a_worker_whose_weights_are_others_by_now_is_not_taken_at_its_records_word(tokenizer: Tokenizer) -> None:
    stale = of_weights("d-1", "b", 2)  # it serves `b` before the router hears of it
    async with routing(tokenizer) as router, stale, of_weights("d-2", "a") as other:
        router.pool.apply(Change("added", replace(stale.record(), model_hash="a")))
        await router.until(lambda: router.pool.workers["d-1"].link.connected)
        pieces = stream(router, request(6))
        await anext(pieces)
        router.pool.apply(Change("removed", stale.record()))
        await router.add(other)
        with fails_with(UnavailableError, "has the weights that the answer was begun with"):
            await collect(pieces)
        assert not other.submits


async def test_each_form_is_weighed_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = []

    def count(request: Request, *others: Any, **named: Any) -> Weighing:
        weighed.append(request.excluded)
        return placement.weigh(request, *others, **named)

    monkeypatch.setattr(assignment, "weigh", count)
    workers = [worker(f"{role}-{form}", form) for role in ("p", "d") for form in ("old", "new")]
    async with routing(tokenizer, *workers) as router:
        await collect(stream(router, request(3)))
    assert sorted(map(sorted, weighed)) == [[("d-new", 1), ("p-new", 1)], [("d-old", 1), ("p-old", 1)]]
