"""What a decision is given of its workers."""

import random
from pathlib import Path

import numpy as np
import pytest

from router.placement.assignment import Assigner
from router.placement.candidates import Request
from router.text.tokenizer import Tokenizer
from tests.router.scripted_worker import ScriptedWorker
from tests.router.small_router import CONFIG, Holdings, routing
from tests.tiny_model import VOCAB_SIZE

NUM_TOKENS = 640


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model, VOCAB_SIZE)


@pytest.mark.parametrize("excluded", [["p0"], ["p0", "p1"]])
async def test_what_was_stored_lately_counts_when_no_prefill_worker_may_serve(
    tokenizer: Tokenizer, excluded: list[str]
) -> None:
    """As where there is none at all: whoever decodes computes the prompt, and gives up what it holds for it."""
    workers = [
        ScriptedWorker("d0"),
        ScriptedWorker("d1"),
        ScriptedWorker("p0", "prefill"),
        ScriptedWorker("p1", "prefill"),
    ]
    async with routing(tokenizer, *workers) as router:
        router.ledger.charge("earlier", ("d0", 1), None, 16 * NUM_TOKENS, 16 * NUM_TOKENS).release()
        assigner = Assigner(router.pool, Holdings(), router.ledger, CONFIG, random.Random(0))
        facts = Request(NUM_TOKENS, 16, frozenset((name, 1) for name in excluded))
        hashes = np.arange(NUM_TOKENS // 16, dtype=np.uint64)
        chosen = set()
        for _ in range(20):
            placement = assigner.weigh(facts, NUM_TOKENS + 10, hashes).placement()
            assert placement is not None
            chosen.add((placement.decode[0], placement.prefill and placement.prefill[0]))
        both = {("d0", "p1"), ("d1", "p1")}
        assert chosen == (both if excluded == ["p0"] else {("d1", None)})
