"""Block hashes, bit for bit as Dynamo computes them (golden vectors) and as the xxhash library does."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from baton_proto.kv_events import MAX_HASH_SEED
from runtime.blocks import xxh3
from runtime.blocks.block_hash import SEED, block_hashes, lora_seed, salted_seed, sequence_hashes
from runtime.compiled import load_compiled

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "block_hashes.json").read_text())

seeds = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The first call may compile, which no example's deadline allows for."""
    load_compiled()


EACH_AND_COMPILED = pytest.mark.parametrize("hashed", [block_hashes, xxh3.block_hashes], ids=["each", "compiled"])
Hashed = Callable[..., NDArray[np.uint64]]


def random_tokens(count: int, entropy: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(entropy).integers(0, 2**32, count, dtype=np.uint32)


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda v: f"{len(v['tokens'])} in {v['block_size']}s")
@EACH_AND_COMPILED
def test_hashes_equal_the_golden_vectors(hashed: Hashed, vector: dict[str, list[int]]) -> None:
    tokens = np.array(vector["tokens"], dtype=np.uint32)
    block_size = vector["block_size"]
    assert isinstance(block_size, int)
    assert hashed(tokens, block_size).tolist() == vector["block_hashes"]


def test_a_lora_adapter_has_its_own_hashes_as_in_the_golden_vector() -> None:
    lora = GOLDEN["lora"]
    tokens = np.array(lora["tokens"], dtype=np.uint32)
    seed = lora_seed(lora["lora_name"])
    assert block_hashes(tokens, lora["block_size"], seed).tolist() == lora["block_hashes"]
    assert block_hashes(tokens, lora["block_size"]).tolist() != lora["block_hashes"]


@given(
    block_size=st.sampled_from([8, 16, 24, 32, 64, 128]),
    num_blocks=st.integers(0, 300),
    rest=st.integers(0, 15),
    seed=seeds,
    entropy=st.integers(0, 2**32),
)
def test_compiled_hashes_are_the_same(block_size: int, num_blocks: int, rest: int, seed: int, entropy: int) -> None:
    tokens = random_tokens(num_blocks * block_size + rest, entropy)
    assert xxh3.block_hashes(tokens, block_size, seed).tolist() == block_hashes(tokens, block_size, seed).tolist()


@given(
    lanes=st.lists(
        st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]), min_size=16, max_size=16
    ),
    seed=st.sampled_from([0, 1, SEED, 2**32 - 1, 2**32, 2**63, 2**64 - 1]),
)
def test_carries_of_extreme_tokens_and_seeds_are_right(lanes: list[int], seed: int) -> None:
    tokens = np.array(lanes * 2, dtype=np.uint32)
    assert xxh3.block_hashes(tokens, 16, seed).tolist() == block_hashes(tokens, 16, seed).tolist()


@EACH_AND_COMPILED
def test_views_and_other_integer_types_have_the_hashes_of_the_same_numbers(hashed: Hashed) -> None:
    tokens = random_tokens(8000, 3)
    assert hashed(tokens[::2], 16).tolist() == hashed(tokens[::2].copy(), 16).tolist()
    assert hashed(tokens[1:], 16).tolist() == hashed(tokens[1:].copy(), 16).tolist()
    assert hashed(tokens.astype(np.int64), 16).tolist() == hashed(tokens, 16).tolist()


@given(st.lists(seeds, max_size=40))
def test_sequence_hashes_chain_block_hashes(hashes: list[int]) -> None:
    chained = sequence_hashes(np.array(hashes, dtype=np.uint64)).tolist()
    expected: list[int] = []
    for block in hashes:
        if expected:
            link = expected[-1].to_bytes(8, "little") + block.to_bytes(8, "little")
            expected.append(xxhash.xxh3_64_intdigest(link, 1337))
        else:
            expected.append(block)
    assert chained == expected


@given(st.lists(seeds, min_size=2, max_size=20), st.data())
def test_a_chain_can_be_continued_from_a_parent(hashes: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(hashes) - 1))
    array = np.array(hashes, dtype=np.uint64)
    whole = sequence_hashes(array)
    assert sequence_hashes(array[cut:], parent=int(whole[cut - 1])).tolist() == whole[cut:].tolist()


def test_a_seed_follows_from_all_salts_and_their_places_and_is_dynamos_without_any() -> None:
    assert salted_seed() == salted_seed("", "", "") == SEED
    salts = [
        ("a", "", ""),
        ("", "a", ""),
        ("", "", "a"),
        ("a", "a", ""),
        ("aa", "", ""),
        ("a', '", "", ""),
        ("\ud800",),
    ]
    seeds = [salted_seed(*each) for each in salts]
    assert len({SEED, *seeds}) == len(salts) + 1
    assert seeds == [salted_seed(*each) for each in salts]
    assert all(0 <= seed <= MAX_HASH_SEED for seed in seeds)


def test_a_seed_is_the_same_number_on_every_machine_and_in_every_version() -> None:
    assert salted_seed("operator's", "tenant", "request's") == 2837104255593946923
