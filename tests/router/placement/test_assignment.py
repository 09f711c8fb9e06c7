"""What a decision is given of its workers."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from baton_proto.kv_events import DISK
from router.index.radix_tree import RadixTree
from router.placement.assignment import Assigner
from router.placement.candidates import Request
from router.text.tokenizer import Tokenizer
from runtime.blocks.block_hash import block_hashes, sequence_hashes
from tests.router.scripted_worker import ScriptedWorker
from tests.router.small_router import CONFIG, Holdings, Router, routing
from tests.tiny_model import VOCAB_SIZE

NUM_TOKENS = 640


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model, VOCAB_SIZE)


def on_disk(router: Router, worker_id: str, hashes: NDArray[np.uint64], count: int) -> RadixTree:
    """A tree in which the worker holds so many blocks, the last half on disk; d1 holds as many on the device."""
    tree, names = RadixTree(), sequence_hashes(hashes)
    for worker in (worker_id, "d1"):
        tree.apply_stored((worker, 1), None, hashes[:count].tobytes(), names[:count].tobytes())
    tree.apply_moved((worker_id, 1), names[count // 2 : count][::-1].tobytes(), DISK)
    return tree


async def test_a_prefix_on_the_device_is_preferred_to_one_on_disk_until_that_is_on_its_way_up(
    tokenizer: Tokenizer,
) -> None:
    hashes = block_hashes(np.arange(NUM_TOKENS, dtype=np.uint32), 16)
    async with routing(tokenizer, ScriptedWorker("d0"), ScriptedWorker("d1")) as router:
        tree = on_disk(router, "d0", hashes, 20)
        index = SimpleNamespace(match=tree.find)
        assigner = Assigner(router.pool, index, router.ledger, CONFIG, random.Random(0))

        def restored(num_tokens: int) -> dict[str, tuple[int, ...]]:
            weighing = assigner.weigh(Request(num_tokens, 16), num_tokens + 10, hashes[: num_tokens // 16])
            return {one.worker[0]: one.lower_blocks for one in weighing.costs()}

        assert restored(NUM_TOKENS) == {"d0": (0, 10), "d1": (0, 0)}
        without_d1 = Request(NUM_TOKENS, 16, frozenset([("d1", 1)]))
        chosen = [assigner.weigh(Request(NUM_TOKENS, 16), NUM_TOKENS, hashes).placement() for _ in range(10)]
        assert {placement.decode for placement in chosen if placement} == {("d1", 1)}
        assignment = assigner.assign("first", without_d1, NUM_TOKENS, hashes)
        assert assignment is not None
        assert restored(NUM_TOKENS) == {"d0": (0, 0), "d1": (0, 0)}
        assert restored(16 * 20) == {"d0": (0, 10), "d1": (0, 0)}, "nothing says that this much was moved"
        assignment.release()
        assert restored(NUM_TOKENS) == {"d0": (0, 10), "d1": (0, 0)}


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
