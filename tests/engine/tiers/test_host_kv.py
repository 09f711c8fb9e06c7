"""The host tier under a real model: prefixes that went there and came back give the answers of a model without it."""

import random
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from engine.core.engine import Engine
from engine.tiers import host_kv as module
from engine.tiers.host_kv import HostKv, host_kv
from engine.tiers.slot_layout import bytes_of_slots
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.config.serving import EngineConfig, ServingConfig
from runtime.errors import ConfigError
from tests.engine.kv_oracle import make_sequence
from tests.engine.prompt_logprobs import assert_engine_scores
from tests.tiny_model import VOCAB_SIZE
from worker.engines.own import build_engine

LAYOUT = SlabLayout(3, 6, 2, 4, 8, "float32")
IN_TWO_GROUPS = SlabLayout(3, 7, 2, 4, 8, "float32", frozenset({0, 2}), 3)
SLOT_BYTES = LAYOUT.nbytes // LAYOUT.num_blocks


@pytest.fixture
def slab() -> Slab:
    slab = Slab(LAYOUT)
    slab.buffer[:] = np.random.default_rng(0).integers(0, 256, LAYOUT.nbytes, np.uint8).tobytes()
    return slab


def content(slab: Slab, block: int) -> list[bytes]:
    offsets = [LAYOUT.offset(layer, block) for layer in range(LAYOUT.num_layers)]
    return [bytes(slab.buffer[offset : offset + LAYOUT.block_bytes]) for offset in offsets]


def test_a_slot_gives_back_the_bytes_of_all_layers_to_any_block(slab: Slab) -> None:
    tier = HostKv(slab, 2 * SLOT_BYTES)
    first, second, untouched = (content(slab, block) for block in (5, 0, 3))
    tier.store([5, 0], [1, 0])
    slab.buffer[: LAYOUT.offset(0, 1)] = bytes(LAYOUT.offset(0, 1))
    tier.load([0, 1], [1, 2])
    assert content(slab, 2) == first
    assert content(slab, 1) == second
    assert content(slab, 3) == untouched


def test_slots_outlive_a_sleep_of_the_slab(slab: Slab) -> None:
    tier = HostKv(slab, SLOT_BYTES)
    kept = content(slab, 4)
    tier.store([4], [0])
    slab.suspend()
    slab.resume()
    tier.load([0], [2])
    assert content(slab, 2) == kept


@pytest.mark.parametrize(
    ("text", "slots"), [("0", None), ("auto", 24), (f"{3 * LAYOUT.nbytes // 6 + 1}", 3), (f"{LAYOUT.nbytes // 6}", 1)]
)
def test_memory_is_given_in_whole_blocks(slab: Slab, text: str, slots: int | None) -> None:
    tier = host_kv(slab, EngineConfig(host_kv_memory=text), ranks=1)
    assert (None if tier is None else tier.num_slots) == slots


def test_auto_leaves_half_of_what_a_container_may_still_take(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 14 * SLOT_BYTES + 1)
    for ranks, slots in ((1, 7), (2, 3)):
        tier = host_kv(slab, EngineConfig(host_kv_memory="auto"), ranks)
        assert tier is not None
        assert tier.num_slots == slots


def test_auto_is_no_tier_where_no_block_has_room(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    for nbytes in (0, 2 * SLOT_BYTES - 1):
        monkeypatch.setattr(module, "available_bytes", lambda nbytes=nbytes: nbytes)
        assert host_kv(slab, EngineConfig(host_kv_memory="auto"), ranks=1) is None


@pytest.mark.parametrize("layout", [LAYOUT, IN_TWO_GROUPS])
def test_what_has_no_room_for_a_block_is_refused_with_the_size_of_one(layout: SlabLayout) -> None:
    least = bytes_of_slots(layout, 1)
    tier = host_kv(Slab(layout), EngineConfig(host_kv_memory=f"{least}"), ranks=1)
    assert tier is not None
    assert tier.num_slots == 1
    refused = rf"engine\.host_kv_memory: {least - 1} is less than one KV block, {least} bytes"
    with pytest.raises(ConfigError, match=refused):
        host_kv(Slab(layout), EngineConfig(host_kv_memory=f"{least - 1}"), ranks=1)


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers, three requests at a time."""
    outputs: dict[str, list[int]] = {}
    waiting = [
        make_sequence(str(number), prompt, max_tokens=6, ignore_eos=True) for number, prompt in enumerate(prompts)
    ]
    running = 0
    while waiting or running:
        while waiting and running < 3:
            engine.add(waiting.pop(0))
            running += 1
        for output in engine.step().outputs:
            outputs.setdefault(output.sequence.request_id, []).extend(output.token_ids)
            assert output.error is None
            running -= output.finish is not None
        assert engine.check_integrity() == []
    return [outputs[str(number)] for number in range(len(prompts))]


def conversations() -> list[list[int]]:
    """Over a few system prompts."""
    dice = random.Random(7)
    systems = [[dice.randrange(3, VOCAB_SIZE) for _ in range(70)] for _ in range(5)]
    prompts = []
    for _ in range(40):
        tail = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randrange(1, 20))]
        prompts.append(dice.choice(systems)[: dice.choice((40, 70))] + tail)
    return prompts


def test_answers_are_those_of_an_engine_without_a_tier(tiny_model: Path) -> None:
    """On a slab that holds two of the system prompts, with a tier that holds a few more."""
    prompts = conversations()
    config = ServingConfig(model=str(tiny_model), engine=EngineConfig(device="cpu", threads=1, kv_memory="1GiB"))
    plain = build_engine(config)
    one_block = bytes_of_slots(plain.kv.slab.layout, 1)
    small = replace(config.engine, kv_memory=f"{20 * one_block}", host_kv_memory=f"{16 * one_block}")
    tiered = build_engine(replace(config, engine=small))
    try:
        assert answers(tiered.engine, prompts) == answers(plain.engine, prompts)
        assert (raised := tiered.engine.block_manager.tiers.num_raised) > 20
        scored = [make_sequence(f"scored {i}", one, prompt_logprobs=2) for i, one in enumerate(prompts[:10])]
        assert_engine_scores(tiny_model, tiered.engine, scored)
        assert not any(sequence.num_cached_tokens for sequence in scored)
        assert tiered.engine.check_integrity() == []
        assert answers(tiered.engine, prompts) == answers(plain.engine, prompts)
        assert tiered.engine.block_manager.tiers.num_raised > raised
    finally:
        plain.close()
        tiered.close()
