"""The host tier of a GPU: what copies and steps on several streams leave behind is what one after the other would."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.sequences.moves import BEFORE_STEP, Move
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.config.serving import EngineConfig, ServingConfig
from runtime.device.drivers import memory_of
from tests.engine.tiers.test_host_kv import answers
from tests.tiny_families import write_family
from tests.tiny_model import VOCAB_SIZE
from worker.engines.own import build_engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

# 256 KiB of a block in a layer, so that copies of several blocks go on for milliseconds, in groups of layers.
LAYOUT = SlabLayout(6, 48, 8, 64, 128, "bfloat16")
IN_TWO_GROUPS = dataclasses.replace(LAYOUT, window_layers=frozenset({0, 2, 3}), num_window_blocks=24)


@pytest.mark.parametrize("layout", [LAYOUT, IN_TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("seed", range(8))
def test_copies_and_steps_in_any_order_leave_what_they_would_one_by_one(seed: int, layout: SlabLayout) -> None:
    from engine.tiers.gpu_kv import GpuHostKv

    slab = Slab(layout, memory_of(torch.device("cuda")))
    tier = GpuHostKv(slab, 64 * layout.nbytes // layout.num_blocks)
    assert (tier.num_slots, tier.spare) == (64, 1)
    assert 1e9 < tier.bytes_per_s < 1e12
    memory = slab.layers
    dice, blocks = random.Random(seed), [0.0] * layout.num_ids
    slots = [0.0] * (tier.num_slots + tier.num_window_slots)
    move_of: dict[int, Move] = {}
    for number in range(300):
        some = dice.sample(range(layout.num_ids), dice.choice((1, 1, 4, 40)))
        num_places = sum(block >= layout.num_blocks for block in some)
        whole = dice.sample(range(tier.num_slots), len(some) - num_places)
        places = dice.sample(range(tier.num_slots, len(slots)), num_places)
        others = [(places if block >= layout.num_blocks else whole).pop() for block in some]
        match dice.randrange(3):
            case 0:
                move_of |= dict.fromkeys(some, tier.store(some, others))
                for block, slot in zip(some, others, strict=True):
                    slots[slot] = blocks[block]
            case 1:
                move_of |= dict.fromkeys(some, tier.load(others, some))
                for block, slot in zip(some, others, strict=True):
                    blocks[block] = slots[slot]
            case _:
                value = float(number % 256)
                moves = list(dict.fromkeys(move_of[block] for block in some if block in move_of))
                for layer in range(BEFORE_STEP, layout.num_layers):
                    for move in moves:
                        move.before(layer)
                    if layer >= 0:
                        there = layout.layer_blocks(layer)
                        memory[layer][[block - there.start for block in some if block in there]] = value
                torch.cuda.current_stream().synchronize()  # no step on its way writes blocks that are copied
                for block in some:
                    blocks[block] = value
    for move in move_of.values():
        move.before(BEFORE_STEP)  # all copies are enqueued
    torch.cuda.synchronize()
    assert all(move.left_s() == 0 for move in move_of.values())
    for layer, cache in enumerate(memory):
        there = layout.layer_blocks(layer)
        found = cache.float().flatten(1)
        expected = torch.tensor(blocks[there.start : there.stop], device="cuda")[:, None]
        assert torch.equal(found, expected.expand_as(found))
    held = [set(torch.frombuffer(tier.content(slot), dtype=torch.bfloat16).tolist()) for slot in range(len(slots))]
    assert held == [{value} for value in slots]
    tier.close()
    slab.close()


def turns(dice: random.Random) -> list[list[int]]:
    """Prompts of conversations in any order: each goes on from an earlier one, whose end comes back."""

    def tokens(least: int, most: int) -> list[int]:
        return [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randrange(least, most))]

    talks, prompts = [tokens(40, 80) for _ in range(7)], []
    for _ in range(60):
        talk = dice.choice(talks)
        talk += tokens(1, 20)
        prompts.append(list(talk))
    return prompts


@pytest.mark.parametrize("family", ["", "gemma3", "gpt-oss"])
def test_answers_are_those_of_an_engine_without_a_tier(tiny_model: Path, tmp_path: Path, family: str) -> None:
    model = write_family(tmp_path, family) if family else tiny_model
    prompts = turns(random.Random(7))
    engine = EngineConfig(device="cuda", dtype="float32", attention="triton", block_size=16, kv_memory="64MiB")
    few = {"max_model_len": 256, "max_batch_tokens": 256, "max_running": 8}  # so that there are few graphs
    config = ServingConfig(model=str(model), engine=replace(engine, **few))
    plain = build_engine(config)
    one_block = plain.kv.slab.layout.num_layers * plain.kv.slab.layout.block_bytes
    small = replace(config.engine, kv_memory=f"{20 * one_block}", host_kv_memory=f"{40 * one_block}")
    tiered = build_engine(replace(config, engine=small))
    try:
        expected = answers(plain.engine, prompts)
        assert answers(tiered.engine, prompts) == expected
        manager = tiered.engine.block_manager
        assert manager.tiers.num_raised > 20
        assert bool(family) == bool(manager.cache.host_places.of)
    finally:
        plain.close()
        tiered.close()
