"""What a decision is given of its workers."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from baton_proto.discovery import LoadReport, WorkerLoad
from baton_proto.kv_events import DISK
from router.index.radix_tree import RadixTree
from router.placement import cost
from router.placement.assignment import Assigner
from router.placement.candidates import Request
from router.placement.expected_prefixes import ExpectedPrefixes
from router.placement.weights import Weights
from router.text.tokenizer import Tokenizer
from router.workers.account import FREEING_S
from router.workers.step_speed import StepSpeeds
from runtime.blocks.block_hash import block_hashes, sequence_hashes
from runtime.config.step_times import StepTimes
from tests.router.scripted_worker import ScriptedWorker
from tests.router.small_router import CONFIG, Holdings, Router, routing

NUM_TOKENS = 640


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


async def test_a_worker_that_has_shown_that_it_is_slower_gets_what_others_take_sooner(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("d0"), ScriptedWorker("d1")) as router:
        assigner = Assigner(router.pool, Holdings(), router.ledger, CONFIG, random.Random(0))
        hashes = np.arange(NUM_TOKENS // 16, dtype=np.uint64)

        def chosen() -> set[str]:
            facts = Request(NUM_TOKENS, 16)
            placements = [assigner.weigh(facts, NUM_TOKENS + 10, hashes).placement() for _ in range(20)]
            return {placement.decode[0] for placement in placements if placement}

        assert chosen() == {"d0", "d1"}
        router.ledger.report(("d0", 1), WorkerLoad())
        router.ledger.learn(("d0", 1), StepTimes(12.0, 0.04, 2.4e-6, 10.0, 0.04, 8.4e-5))
        assert chosen() == {"d1"}


async def test_of_two_workers_with_the_prefix_on_disk_the_one_whose_disk_was_measured_to_be_faster_is_chosen(
    tokenizer: Tokenizer,
) -> None:
    hashes = block_hashes(np.arange(NUM_TOKENS, dtype=np.uint32), 16)
    tree, names = RadixTree(), sequence_hashes(hashes)
    async with routing(tokenizer, ScriptedWorker("d0"), ScriptedWorker("d1")) as router:
        speeds = StepSpeeds(router.ledger, StepTimes())
        for key in (("d0", 1), ("d1", 1)):
            router.ledger.report(key, WorkerLoad())
            tree.apply_stored(key, None, hashes.tobytes(), names.tobytes())
            tree.apply_moved(key, names[::-1].tobytes(), DISK)
        index = SimpleNamespace(match=tree.find)
        config = replace(CONFIG, placement=Weights(disk_token_ms=0.01))
        assigner = Assigner(router.pool, index, router.ledger, config, random.Random(0))

        def weighed() -> tuple[set[str], list[float]]:
            weighings = [assigner.weigh(Request(NUM_TOKENS, 16), NUM_TOKENS, hashes) for _ in range(20)]
            placements = [weighing.placement() for weighing in weighings]
            terms = [round(one.terms[cost.DISK] / (NUM_TOKENS - 16), 6) for one in weighings[0].costs()]
            return {placement.decode[0] for placement in placements if placement}, terms

        assert weighed() == ({"d0", "d1"}, [0.01, 0.01]), "as configured, until they have measured"
        speeds.load_report(LoadReport(version=1, worker_id="d0", incarnation=1, load=WorkerLoad(), disk_token_ms=0.012))
        assert weighed() == ({"d1"}, [0.012, 0.01])
        speeds.load_report(LoadReport(version=1, worker_id="d1", incarnation=1, load=WorkerLoad(), disk_token_ms=0.015))
        assert weighed() == ({"d0"}, [0.012, 0.015])


async def test_a_prompt_whose_prefix_is_on_its_way_waits_until_it_is_there_or_goes_where_that_is_sooner(
    tokenizer: Tokenizer,
) -> None:
    async with routing(tokenizer, ScriptedWorker("d0"), ScriptedWorker("d1")) as router:
        expected = ExpectedPrefixes(30.0)
        config = replace(CONFIG, placement=Weights(decode_steps=2.0, crowd_weight=3.0))
        assigner = Assigner(router.pool, Holdings(), router.ledger, config, random.Random(0), expected)
        facts, hashes = Request(3200, 16), np.arange(200, dtype=np.uint64)
        first = assigner.assign("first", facts, 3210, hashes)
        assert first is not None
        follower = assigner.weigh(facts, 3210, hashes).placement()
        assert follower is not None
        assert follower.decode == first.link.worker, "computing it once more would cost others"
        assert follower.ttft_ms == pytest.approx(first.placement.ttft_ms, rel=0.2)
        router.ledger.report(other := ({("d0", 1), ("d1", 1)} - {first.link.worker}).pop(), WorkerLoad())
        router.ledger.learn(other, StepTimes(1.0, 0.005, 3e-7, 5.0, 0.02, 4.2e-5))
        sooner = assigner.weigh(facts, 3210, hashes).placement()
        assert sooner is not None
        assert sooner.decode == other
        first.release()


async def test_a_prompt_that_is_shipped_takes_the_blocks_that_its_decode_worker_lacks(tokenizer: Tokenizer) -> None:
    decode, prefill = ("d0", 1), ("p0", 1)
    async with routing(tokenizer, ScriptedWorker("d0"), ScriptedWorker("p0", role="prefill")) as router:
        index = Holdings({decode: 12, prefill: 36})
        assigner = Assigner(router.pool, index, router.ledger, CONFIG, random.Random(0))
        router.ledger.report(decode, WorkerLoad(blocks_total=1000))
        assignment = assigner.assign("r", Request(NUM_TOKENS, 16), NUM_TOKENS, np.arange(40, dtype=np.uint64))
        assert assignment is not None
        assert assignment.placement.prefill == prefill
        assignment.prefill_done()
        assignment.release()
        freed_us = router.ledger.columns((decode,))[0, 6]
        assert freed_us == pytest.approx(FREEING_S * 1e6 / (40 - 12), rel=0.1)


async def test_blocks_below_the_device_count_as_taken_when_a_prompt_goes_on_behind_them(tokenizer: Tokenizer) -> None:
    key = ("d0", 1)
    hashes = block_hashes(np.arange(NUM_TOKENS, dtype=np.uint32), 16)
    tree, names = RadixTree(), sequence_hashes(hashes)
    tree.apply_stored(key, None, hashes.tobytes(), names.tobytes())
    tree.apply_moved(key, names[10:][::-1].tobytes(), DISK)
    async with routing(tokenizer, ScriptedWorker("d0")) as router:
        assigner = Assigner(
            router.pool, SimpleNamespace(match=tree.find), router.ledger, CONFIG, random.Random(0), ExpectedPrefixes(0)
        )
        router.ledger.report(key, WorkerLoad(blocks_total=1000))
        assignment = assigner.assign("r", Request(NUM_TOKENS, 16), NUM_TOKENS, hashes)
        assert assignment is not None
        assert assignment.placement.cached_blocks == len(hashes) - 1
        assignment.prefill_done()
        assignment.release()
        held = (len(hashes) - 1) - (len(hashes) - 10)  # the last block counts as lowered, although it is computed
        assert router.ledger.columns((key,))[0, 6] == pytest.approx(FREEING_S * 1e6 / (len(hashes) - held), rel=0.1)


@pytest.mark.parametrize(("longest", "decodes"), [(1000, "p0"), (999, "d0")])
async def test_a_prefill_worker_keeps_an_answer_that_fits_it_as_a_whole_and_is_charged_for_it_alone(
    tokenizer: Tokenizer, longest: int, decodes: str
) -> None:
    """The decode worker has 300 requests. Of a prompt that is shipped, the rest need not fit."""
    prefill = ScriptedWorker("p0", role="prefill")
    prefill.max_model_len = longest
    async with routing(tokenizer, ScriptedWorker("d0"), prefill) as router:
        router.ledger.report(("d0", 1), WorkerLoad(running=300))
        router.ledger.report(("p0", 1), WorkerLoad(running=3, prompts=3))
        config = replace(CONFIG, max_running_per_worker=999, placement=Weights())
        assigner = Assigner(router.pool, Holdings({}), router.ledger, config, random.Random(0))
        assignment = assigner.assign("r", Request(NUM_TOKENS, 16), 1000, np.arange(40, dtype=np.uint64))
        assert assignment is not None
        assert assignment.link.worker == (decodes, 1)
        assert (assignment.placement.reason == cost.KEEPS) == (decodes == "p0") == (assignment.prefill is None)
        assert router.ledger.view(("p0", 1)).requests == (decodes == "p0")
        assignment.release()
