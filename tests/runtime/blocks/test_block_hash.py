"""Block hashes, bit for bit as Dynamo computes them (golden vectors) and as the xxhash library does."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st

from baton_proto.kv_events import MAX_HASH_SEED
from runtime.blocks.block_hash import SEED, block_hashes, lora_seed, prepare, salted_seed, sequence_hashes

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "block_hashes.json").read_text())

seeds = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """The first call may compile, which no example's deadline allows for."""
    prepare()


ALONE = """
import os, resource, numpy as np
from runtime.blocks.block_hash import block_hashes, prepare, sequence_hashes
prepare()
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
print(len(sequence_hashes(block_hashes(np.zeros(160, dtype=np.uint32), 16))))
"""


def test_once_prepared_a_hash_opens_no_file() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("10\n", "")


def reference(tokens: np.ndarray[tuple[int], np.dtype[np.uint32]], block_size: int, seed: int) -> list[int]:
    data, step = tokens.astype("<u4").tobytes(), 4 * block_size
    return [xxhash.xxh3_64_intdigest(data[i : i + step], seed) for i in range(0, len(data) - step + 1, step)]


def random_tokens(count: int, entropy: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.default_rng(entropy).integers(0, 2**32, count, dtype=np.uint32)


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda v: f"{len(v['tokens'])} in {v['block_size']}s")
def test_hashes_equal_the_golden_vectors(vector: dict[str, list[int]]) -> None:
    tokens = np.array(vector["tokens"], dtype=np.uint32)
    block_size = vector["block_size"]
    assert isinstance(block_size, int)
    assert block_hashes(tokens, block_size).tolist() == vector["block_hashes"]


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
def test_hashes_equal_those_of_xxhash(block_size: int, num_blocks: int, rest: int, seed: int, entropy: int) -> None:
    tokens = random_tokens(num_blocks * block_size + rest, entropy)
    assert block_hashes(tokens, block_size, seed).tolist() == reference(tokens, block_size, seed)


@given(
    lanes=st.lists(
        st.sampled_from([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]), min_size=16, max_size=16
    ),
    seed=st.sampled_from([0, 1, SEED, 2**32 - 1, 2**32, 2**63, 2**64 - 1]),
)
def test_carries_of_extreme_tokens_and_seeds_are_right(lanes: list[int], seed: int) -> None:
    tokens = np.array(lanes * 2, dtype=np.uint32)
    assert block_hashes(tokens, 16, seed).tolist() == reference(tokens, 16, seed)


def test_a_view_of_other_tokens_is_hashed_as_a_copy_of_it_would_be() -> None:
    tokens = random_tokens(8000, 3)
    assert block_hashes(tokens[::2], 16).tolist() == reference(tokens[::2].copy(), 16, SEED)
    assert block_hashes(tokens[1:], 16).tolist() == reference(tokens[1:].copy(), 16, SEED)


@pytest.mark.parametrize("block_size", [16, 64])
def test_tokens_of_another_integer_type_have_the_hashes_of_the_same_numbers(block_size: int) -> None:
    tokens = random_tokens(200, 5)
    assert block_hashes(tokens.astype(np.int64), block_size).tolist() == reference(tokens, block_size, SEED)


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
