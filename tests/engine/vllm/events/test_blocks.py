"""vLLM's blocks under Baton's names: against the hashes of the tokens, and against a model of vLLM's cache."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from baton_proto.images import Image
from baton_proto.kv_events import Cleared, KvEvent, Removed, Stored
from engine.vllm.events.blocks import MISFIT, WHOLE_PROMPTS, VllmBlocks
from engine.vllm.events.messages import decode_vllm_batch
from router.index.radix_tree import RadixTree
from runtime.blocks.block_hash import block_hashes, lora_seed, sequence_hashes, with_images
from runtime.errors import ConfigError, ProtocolError
from tests.engine.vllm.events.vllm_engine import FORMS, RECORDED, RECORDING, Messages, recorded

BLOCK = 4
KEY = ("vllm", 1)


def names_of(tokens: list[int], lora: str | None = None) -> tuple[list[int], list[int]]:
    """Block and sequence hashes."""
    hashes = (
        block_hashes(np.array(tokens, dtype=np.uint32), BLOCK)
        if lora is None
        else block_hashes(np.array(tokens, dtype=np.uint32), BLOCK, lora_seed(lora))
    )
    return hashes.tolist(), sequence_hashes(hashes).tolist()


def run(tokens: list[int], first: int = 0, lora: str | None = None) -> Stored:
    """The event for the blocks of a prompt from number `first` on."""
    blocks, sequences = names_of(tokens, lora)
    return Stored(
        sequences[first - 1] if first else None,
        np.array(blocks[first:], dtype="<u8").tobytes(),
        np.array(sequences[first:], dtype="<u8").tobytes(),
    )


def gone(*sequence_hashes_leaves_first: int) -> Removed:
    return Removed(np.array(sequence_hashes_leaves_first, dtype="<u8").tobytes())


def prompt(num_blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + num_blocks * BLOCK))


class Feed:
    """Blocks that are fed with what vLLM would send."""

    def __init__(self, form: str = RECORDED) -> None:
        self.messages = Messages(form, block_size=BLOCK)
        self.blocks = VllmBlocks(BLOCK)

    def __call__(self, *events: Any) -> list[KvEvent]:
        batch = decode_vllm_batch(self.messages.payload(*events))
        return [told for event in batch.events for told in self.blocks.apply(event)]

    def stored(self, names: list[Any], parent: Any, tokens: list[int], **fields: Any) -> list[KvEvent]:
        return self(self.messages.stored(names, parent, tokens, **fields))

    def removed(self, *names: Any) -> list[KvEvent]:
        return self(self.messages.removed(list(names)))


@pytest.fixture(params=FORMS)
def feed(request: pytest.FixtureRequest) -> Feed:
    return Feed(request.param)


@pytest.mark.parametrize("names", [[11, 2**64 - 1, 33], [b"a" * 32, b"b" * 32, b"c" * 32], [-5, -6, -7]])
def test_blocks_are_named_by_the_hashes_of_their_tokens(feed: Feed, names: list[Any]) -> None:
    tokens = prompt(3)
    assert feed.stored(names[:2], None, tokens[: 2 * BLOCK]) == [run(tokens[: 2 * BLOCK])]
    assert feed.stored(names[2:], names[1], tokens[2 * BLOCK :]) == [run(tokens, first=2)]
    _, sequences = names_of(tokens)
    assert feed.removed(names[2], names[1]) == [gone(sequences[2], sequences[1])]
    assert feed.blocks.num_shown == 1
    assert feed(feed.messages.cleared()) == [Cleared()]
    assert feed.blocks.num_shown == 0
    assert not feed.blocks.skipped


def test_every_recorded_message_of_a_real_engine_is_read() -> None:
    """The recording ends with a cleared cache and one prompt of two blocks."""
    blocks, tree = VllmBlocks(RECORDING["block_size"]), RadixTree()
    for _, _, payload in recorded():
        for event in decode_vllm_batch(payload).events:
            for told in blocks.apply(event):
                tree.apply(KEY, told)
    assert not blocks.skipped
    hashes = block_hashes(np.arange(9000, 9000 + 2 * RECORDING["block_size"], dtype=np.uint32), RECORDING["block_size"])
    (held,) = tree.dump(KEY)
    assert held.block_hashes == hashes.astype("<u8").tobytes()


def test_the_oldest_form_of_the_messages_is_read_too() -> None:
    """Without medium and what came after it."""
    import msgspec

    payload = msgspec.msgpack.encode(
        [1.0, [["BlockStored", [1], None, prompt(1), BLOCK, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]]]
    )
    blocks = VllmBlocks(BLOCK)
    told = [event for told in map(blocks.apply, decode_vllm_batch(payload).events) for event in told]
    assert told == [run(prompt(1)), gone(names_of(prompt(1))[1][0]), Cleared()]


def test_fields_of_later_releases_are_passed_over() -> None:
    import msgspec

    event = ["BlockStored", [1], None, prompt(1), BLOCK, None, "GPU", None, None, 0, "full_attention", None, "new"]
    (decoded,) = decode_vllm_batch(msgspec.msgpack.encode([1.0, [event], 0, "new"])).events
    assert VllmBlocks(BLOCK).apply(decoded) == [run(prompt(1))]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x90", b"\x92\xcb", b"\x80", b"[1,2]", b"\x93\x01\x91\x91\xa4Evil\xc0"]
)
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="no batch of KV events"):
        decode_vllm_batch(payload)


def test_a_block_is_gone_with_its_last_copy(feed: Feed) -> None:
    tokens = prompt(2)
    assert feed.stored([1, 2], None, tokens) == [run(tokens)]
    assert feed.stored([1, 2], None, tokens) == []
    assert feed.removed(2) == []
    assert feed.removed(2) == [gone(names_of(tokens)[1][1])]
    assert feed.removed(1) == []


def test_what_follows_an_evicted_block_is_withdrawn_and_told_again_when_it_is_back(feed: Feed) -> None:
    tokens, other = prompt(3), prompt(2) + prompt(1, start=100)
    feed.stored([1, 2, 3], None, tokens)
    feed.stored([4], 2, other[2 * BLOCK :])
    sequences = names_of(tokens)[1]
    (removed,) = feed.removed(2)
    assert isinstance(removed, Removed)
    hashes = np.frombuffer(removed.sequence_hashes, dtype="<u8").tolist()
    assert set(hashes) == {sequences[1], sequences[2], names_of(other)[1][2]}
    assert hashes[-1] == sequences[1]
    assert feed.removed(3) == []
    assert feed.stored([2], 1, tokens[BLOCK : 2 * BLOCK]) == [run(tokens[: 2 * BLOCK], first=1), run(other, first=2)]


def test_blocks_whose_parent_is_not_known_are_left_out(feed: Feed) -> None:
    assert feed.stored([8, 9], 7, prompt(2)) == []
    assert feed.removed(9) == []
    assert feed.blocks.skipped == {"unknown parent": 2, "unknown removal": 1}


def test_a_run_whose_tokens_do_not_fill_its_blocks_is_left_out(feed: Feed) -> None:
    """With a sliding window vLLM tells the tokens of all blocks, and the names of those within the window."""
    assert feed.stored([1, 2], None, prompt(2)[:-1]) == []
    assert feed.stored([3], None, prompt(2)) == []
    assert feed.blocks.skipped == {MISFIT: 3}


def test_another_block_size_is_refused(feed: Feed) -> None:
    with pytest.raises(
        ConfigError, match="vLLM's blocks hold 32 tokens, this cluster's 4; start vLLM with --block-size 4"
    ):
        feed.stored([1], None, list(range(32)), block_size=32)


def test_token_ids_that_are_none_are_refused(feed: Feed) -> None:
    with pytest.raises(ProtocolError, match="token ids"):
        feed.stored([1], None, [-1, 2, 3, 4])


def test_copies_outside_of_the_gpu_and_other_kinds_of_attention_do_not_count(feed: Feed) -> None:
    assert feed.stored([1], None, prompt(1), medium="CPU") == []
    assert feed.stored([1], None, prompt(1), medium=None) == [run(prompt(1))]
    assert feed(feed.messages.removed([1], medium="CPU")) == []
    assert feed.removed(1) != []


@pytest.mark.parametrize("kind", [*WHOLE_PROMPTS])
def test_of_several_kinds_of_attention_the_one_with_whole_prompts_is_followed(feed: Feed, kind: str) -> None:
    """Wherever it stands: in Gemma's cache it is the last of its groups."""
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    whole = {"group_idx": 2, "kv_cache_spec_kind": kind}
    assert feed.stored([1], None, prompt(2), **window) == []
    assert feed.stored([1, 2], None, prompt(2), **whole) == [run(prompt(2))]
    assert feed.stored([1, 2], None, prompt(2), **(whole | {"group_idx": 3})) == [], "a second one holds the same"
    assert feed(feed.messages.removed([1, 2], group_idx=0)) == []
    assert feed(feed.messages.removed([2], group_idx=3)) == []
    assert feed(feed.messages.removed([2], group_idx=2)) == [gone(names_of(prompt(2))[1][1])]
    assert feed.blocks.skipped == {}


def test_older_versions_tell_no_kind_and_the_first_group_is_followed(feed: Feed) -> None:
    assert feed.stored([1], None, prompt(1), group_idx=1, kv_cache_spec_kind=None) == []
    assert feed.stored([1], None, prompt(1), group_idx=None, kv_cache_spec_kind=None) == [run(prompt(1))]


@pytest.mark.parametrize("key", ["sql", ("lora", "sql", "/adapters/sql")])  # before 0.32, and since
def test_lora_blocks_are_hashed_with_the_adapters_name(feed: Feed, key: object) -> None:
    tokens = prompt(2)
    told = feed.stored([1, 2], None, tokens, lora_id=1, lora_name="sql", extra_keys=[(key,), (key,)])
    assert told == [run(tokens, lora="sql")]
    assert feed.stored([4], None, prompt(1), extra_keys=[(key,)]) == [], "of an adapter that the event does not name"
    feed.blocks.skipped.clear()
    assert feed.stored([3], None, prompt(1), lora_id=1) == []
    assert feed.blocks.skipped == {"LoRA without a name": 1}


def test_blocks_with_images_have_the_names_that_routers_give_them(feed: Feed) -> None:
    """Two images touch the second block, and one of them the third. In another order they are other blocks."""
    tokens = prompt(4)
    images = [Image("a", "", 4, 2), Image("b", "", 7, 3)]
    keys = [None, (("a", 0), ("b", 3)), (("b", -1),), None]
    (told,) = feed.stored([1, 2, 3, 4], None, tokens, extra_keys=keys)
    hashes = with_images(block_hashes(np.array(tokens, dtype=np.uint32), BLOCK), images, BLOCK)
    assert told == Stored(None, hashes.tobytes(), sequence_hashes(hashes).tobytes())
    again = feed.stored([5, 6], 1, tokens[BLOCK : 3 * BLOCK], extra_keys=[(("b", 0), ("a", 3)), (("a", -1),)])
    assert next(event for event in again if isinstance(event, Stored)).block_hashes != hashes[1:3].tobytes()
    assert not feed.blocks.skipped


def test_blocks_that_hold_more_than_tokens_are_left_out_with_what_follows(feed: Feed) -> None:
    tokens = prompt(3)
    assert feed.stored([1, 2, 3], None, tokens, extra_keys=[None, ("image", 5), None]) == [run(tokens[:BLOCK])]
    assert feed.stored([4], 3, prompt(1, start=100)) == []
    assert feed.blocks.skipped == {"more than tokens in it": 2, "unknown parent": 1}


def test_a_salt_that_stands_for_a_seed_changes_the_hashes_of_its_whole_chain() -> None:
    tokens = prompt(3)
    blocks, messages = VllmBlocks(BLOCK, lambda key: 7 if key == "salt" else None), Messages(block_size=BLOCK)
    events = [
        messages.stored([1, 2], None, tokens[: 2 * BLOCK], extra_keys=[("salt",), None]),
        messages.stored([3], 2, tokens[2 * BLOCK :], extra_keys=[None]),
        messages.stored([4, 5], None, tokens[: 2 * BLOCK], extra_keys=[("another",), None]),
    ]
    told = [told for event in decode_vllm_batch(messages.payload(*events)).events for told in blocks.apply(event)]
    hashes = block_hashes(np.array(tokens, dtype=np.uint32), BLOCK, 7).astype("<u8").tobytes()
    assert b"".join(run.block_hashes for run in told if isinstance(run, Stored)) == hashes
    assert blocks.skipped == {"more than tokens in it": 2}
    keys = [(("lora", "sql", "/adapters/sql"), "salt"), (("lora", "sql", "/adapters/sql"),)]
    of_adapter = messages.stored([6, 7], None, tokens[: 2 * BLOCK], extra_keys=keys, lora_id=1, lora_name="sql")
    ((run,),) = (blocks.apply(event) for event in decode_vllm_batch(messages.payload(of_adapter)).events)
    assert isinstance(run, Stored)
    both = block_hashes(np.array(tokens[: 2 * BLOCK], dtype=np.uint32), BLOCK, lora_seed("sql", 7))
    assert run.block_hashes == both.astype("<u8").tobytes()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 2), min_size=1, max_size=5)),
        st.tuples(st.just("evict"), st.integers(0, 1000)),
        st.tuples(st.just("clear"), st.none()),
    ),
    max_size=60,
)


@given(steps)
@settings(deadline=None)
def test_the_index_holds_every_block_whose_whole_prefix_vllm_holds(steps: list[tuple[str, Any]]) -> None:
    """vLLM's cache as a bag of paths, from which any block may be evicted; `runs` tells the same as the events."""
    feed, tree, cache = Feed(), RadixTree(), list[tuple[int, ...]]()
    for what, argument in steps:
        told: list[KvEvent] = []
        if what == "store":
            path = tuple(argument)
            known = next((n for n in range(len(path), 0, -1) if path[:n] in cache), 0)
            if known == len(path):
                known -= 1  # one more copy of the last block
            if any(path[:n] not in cache for n in range(1, known + 1)):
                continue  # vLLM finds prefixes from their start on
            names = [hash(path[:n]) for n in range(known + 1, len(path) + 1)]
            cache += [path[:n] for n in range(known + 1, len(path) + 1)]
            tokens = [token for block in path[known:] for token in [block] * BLOCK]
            told = feed.stored(names, hash(path[:known]) if known else None, tokens)
        elif what == "evict" and cache:
            told = feed.removed(hash(cache.pop(argument % len(cache))))
        elif what == "clear":
            cache.clear()
            told = feed(feed.messages.cleared())
        for event in told:
            tree.apply(KEY, event)
    expected = {path for path in cache if all(path[:n] in cache for n in range(1, len(path)))}
    hashes = {names_of([token for block in path for token in [block] * BLOCK])[1][-1] for path in expected}
    again = RadixTree()
    for event in feed.blocks.runs():
        again.apply(KEY, event)
    for held in (tree, again):
        table = b"".join(run.sequence_hashes for run in held.dump(KEY))
        assert set(np.frombuffer(table, dtype="<u8").tolist()) == hashes
    assert feed.blocks.num_shown == len(hashes)
