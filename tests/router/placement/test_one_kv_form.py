"""Workers of two forms of KV in one service: no prompt is shipped from one form to the other."""

import math
import random
from typing import Any

import pytest

from router.placement import assignment, placement
from router.placement.candidates import Request
from router.placement.one_kv_form import best_form, of_each_form
from router.placement.placement import Weighing
from router.placement.weights import Weights
from router.text.tokenizer import Tokenizer
from tests.router.candidates import Candidate, weigh
from tests.router.scripted_worker import ScriptedWorker, greedy
from tests.router.small_router import PROMPT, collect, request, routing, stream


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
        assert router.pool.strangers() == ()
        assert (await collect(stream(router, request(3)))).tokens == {0: greedy(PROMPT, 3)}


def test_the_form_that_is_in_time_is_taken_although_another_one_costs_less() -> None:
    rows = [Candidate(("cheap", 1), 399, 12000, 0), Candidate(("soon", 1), 0, 3120, 0)]  # cached blocks, queued tokens

    facts = Request(6400, 16)
    others = [frozenset([row.worker]) for row in rows]
    chosen = {}
    for due_ms in (math.inf, 222.0, 1.0):
        forms = of_each_form(facts, others)
        weighings = [weigh(form, rows, [], Weights(), random.Random(1), due_ms=due_ms) for form in forms]
        best = best_form(weighings, due_ms).placement()
        assert best is not None
        chosen[due_ms] = best.decode
    assert chosen == {math.inf: ("cheap", 1), 222.0: ("soon", 1), 1.0: ("soon", 1)}


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
