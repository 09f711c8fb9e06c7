"""Host memory and disk under real models whose layers with a window have blocks of their own: conversations come back
from wherever their ends lie, over restarts, and no answer changes."""

import random
from pathlib import Path

import pytest

from tests.engine.tiers.disk_worker import Worker, worker
from tests.tiny_families import write_family
from tests.tiny_model import VOCAB_SIZE


def chat(one: Worker, seed: int) -> tuple[list[list[int]], int]:
    """The answers of some conversations, turn by turn, and how many tokens of their prompts were found."""
    dice, answers, num_found = random.Random(seed), [], 0
    talks = [[dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randrange(60, 110))] for _ in range(9)]
    for _ in range(30):
        talk = dice.choice(talks)
        talk += [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randrange(1, 12))]
        sequence, answer = one.answer(talk)
        talk += answer
        num_found += sequence.num_cached_tokens
        answers.append(answer)
    return answers, num_found


@pytest.mark.parametrize(("family", "ranks"), [("gemma3", 1), ("gpt-oss", 1), ("mistral, windows", 1), ("gemma3", 2)])
def test_conversations_come_back_from_host_memory_and_disk_as_if_they_had_never_left(
    family: str, ranks: int, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if ranks > 1 else {}
    model, folder = write_family(tmp_path / "model", family, **heads), tmp_path / "disk"
    expected = []
    for life in range(2):
        with worker(model, None, ranks=ranks) as plain:
            assert plain.assembly.kv.slab.layout.window_layers
            expected.append(chat(plain, life))
    for life in (0, 1, 0):
        with worker(model, folder, num_host=40, num_disk=400, ranks=ranks) as one:
            answers, num_found = chat(one, life)
            assert answers == expected[life][0]
            assert num_found > expected[life][1], "than on the device alone"
            tiers, places = one.engine.block_manager.tiers, one.engine.block_manager.cache.host_places
            assert places.of
            assert tiers.num_disk_errors == 0
            while tiers.flush():
                one.until_written()
    assert tiers.num_read > 20, "what an earlier process wrote"
