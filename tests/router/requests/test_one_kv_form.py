"""Workers of two forms of KV in one service: no prompt is shipped from one form to the other."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from router.placement.candidates import Request
from router.placement.placement import Weighing
from router.requests.one_kv_form import of_one_form
from router.text.tokenizer import Tokenizer
from runtime.config.serving import PlacementConfig
from tests.router.candidates import Candidate, weigh
from tests.router.scripted_worker import ScriptedWorker, greedy
from tests.router.small_router import PROMPT, collect, request, routing, stream
from tests.tiny_model import VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model, VOCAB_SIZE)


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


async def test_forms_do_not_matter_where_nobody_ships(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, worker("d-old", "old"), worker("d-new", "new")) as router:
        assert router.pool.strangers() == ()
        assert (await collect(stream(router, request(3)))).tokens == {0: greedy(PROMPT, 3)}


def test_the_form_that_is_in_time_is_taken_although_another_one_costs_less() -> None:
    rows = [Candidate(("cheap", 1), 399, 12000, 0), Candidate(("soon", 1), 0, 3120, 0)]  # cached blocks, queued tokens

    def weighed(request: Request, max_tokens: int, hashes: Any, due_ms: float) -> Weighing:
        return weigh(request, rows, [], PlacementConfig(), random.Random(1), due_ms=due_ms)

    pool: Any = SimpleNamespace(strangers=lambda: tuple(frozenset([row.worker]) for row in rows))
    assigner: Any = SimpleNamespace(weigh=weighed)
    facts, hashes = Request(6400, 16), np.zeros(0, np.uint64)
    left_out = {
        due_ms: of_one_form(pool, assigner, facts, 1, hashes, due_ms).excluded for due_ms in (math.inf, 222.0, 1.0)
    }
    assert left_out == {math.inf: {("soon", 1)}, 222.0: {("cheap", 1)}, 1.0: {("cheap", 1)}}
