import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from router.text import segment_cache
from router.text.segment_cache import SegmentCache, boundary_pattern, kept_bytes
from router.text.text_encoder import TextEncoder, TokenIds, text_encoder
from tests.tiny_model import SPECIAL_TOKENS

LONG = "a system prompt that is long enough to be kept, whoever asks and whatever for"


class Counting:
    """Passes on to a real encoder and remembers what was asked."""

    def __init__(self, encode: TextEncoder) -> None:
        self.asked: list[str] = []
        self._encode = encode

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> list[TokenIds]:
        self.asked += texts
        return self._encode(texts, add_special_tokens)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture
def encoder(tokenizer: tokenizers.Tokenizer, tiny_model: Path) -> Counting:
    return Counting(text_encoder(tokenizer, tiny_model / "tokenizer.json"))


@pytest.fixture
def cache(tokenizer: tokenizers.Tokenizer, encoder: Counting) -> SegmentCache:
    return SegmentCache(encoder, boundary_pattern(tokenizer.get_added_tokens_decoder().values()))


def tokens(cache: SegmentCache, text: str) -> list[int]:
    found: list[int] = cache.finish(cache.begin(text)).tolist()
    return found


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_the_sum_of_the_segments_is_the_text(tokenizer: tokenizers.Tokenizer, tiny_model: Path) -> None:
    cache = SegmentCache(
        text_encoder(tokenizer, tiny_model / "tokenizer.json"),
        boundary_pattern(tokenizer.get_added_tokens_decoder().values()),
        max_bytes=2000,
    )
    parts = st.one_of(st.text(max_size=40), st.sampled_from([*SPECIAL_TOKENS, "<|im_", "|>", " \n ", LONG]))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(parts, max_size=12))
    def check(chosen: list[str]) -> None:
        text = "".join(chosen)
        assert tokens(cache, text) == tokenizer.encode(text, add_special_tokens=False).ids

    check()


def test_only_what_is_new_is_tokenized(cache: SegmentCache, encoder: Counting) -> None:
    system, question = turn("system", LONG), turn("user", "a question of some length, which comes back " * 2)
    tokens(cache, system + question)
    encoder.asked.clear()
    text = cache.begin(system + question + turn("assistant", "an answer that is not short either"))
    assert text.num_chars < len(system)
    cache.finish(text)
    assert LONG not in "".join(encoder.asked)
    assert "an answer that is not short either" in "".join(encoder.asked)


def test_the_least_recently_used_segment_goes_first(tokenizer: tokenizers.Tokenizer, encoder: Counting) -> None:
    pattern = boundary_pattern(tokenizer.get_added_tokens_decoder().values())
    first, second, third = (f"<|im_start|>{letter * 100}" for letter in "abc")
    two = sum(kept_bytes(text, encoder([text], False)[0]) for text in (first, second))
    cache = SegmentCache(encoder, pattern, max_bytes=two)
    for text in (first, second, first, third):
        tokens(cache, text)
    assert [cache.begin(text).num_chars for text in (first, second, third)] == [0, len(second), 0]


def test_many_small_segments_stay_within_the_memory_that_is_said(
    tokenizer: tokenizers.Tokenizer, tiny_model: Path
) -> None:
    encode = text_encoder(tokenizer, tiny_model / "tokenizer.json")
    pattern = boundary_pattern(tokenizer.get_added_tokens_decoder().values())
    limit = 1 << 17
    cache = SegmentCache(encode, pattern, max_bytes=limit)
    tokens(cache, "<|im_start|>" + "x" * 100)  # what the library allocates once
    tracemalloc.start()
    try:
        for number in range(500):
            tokens(cache, f"<|im_start|>{number:032d}" + "<|im_end|>" * 50)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * limit < kept < 1.3 * limit


def test_what_the_template_writes_around_each_message_is_tokenized_once(cache: SegmentCache, encoder: Counting) -> None:
    end = "<|im_end|>\n"
    tokens(cache, turn("user", "one") + turn("assistant", "two"))
    encoder.asked.clear()
    tokens(cache, turn("user", "three") + turn("assistant", "two"))
    assert encoder.asked == [turn("user", "three").removesuffix(end)]


def test_a_text_that_fails_leaves_nothing_behind(cache: SegmentCache) -> None:
    text = turn("user", "\ud800" + LONG)
    for _ in range(2):
        with pytest.raises(Exception, match="Unicode"):
            tokens(cache, text)


@pytest.mark.parametrize("trait", ["normalized", "lstrip", "single_word"])
def test_tokens_that_depend_on_their_surroundings_are_no_boundaries(trait: str, encoder: Counting) -> None:
    traits = {"normalized": False, trait: True}
    assert boundary_pattern([tokenizers.AddedToken("<s>", **traits)]) is None
    assert boundary_pattern([]) is None
    cache = SegmentCache(encoder, None)
    text = turn("user", LONG)
    assert np.array_equal(cache.finish(cache.begin(text)), encoder([text], False)[0])


def test_of_tokens_that_begin_alike_the_longest_is_found() -> None:
    made = [tokenizers.AddedToken(text, normalized=False) for text in ("<s", "<s>")]
    pattern = boundary_pattern(made)
    assert pattern is not None
    assert [match.group() for match in pattern.finditer("a<s>b<s c")] == ["<s>", "<s"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<s>", "<s", "<", "s", ">", "a", "<se>"]), max_size=40), st.integers(1, 9))
def test_a_search_in_windows_finds_what_one_search_finds(parts: list[str], window_chars: int) -> None:
    text = "".join(parts)
    pattern = boundary_pattern(
        [tokenizers.AddedToken(token, normalized=False) for token in ("<s", "<s>", "><", "<se>")]
    )
    assert pattern is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_cache, "WINDOW_CHARS", window_chars)
        assert list(segment_cache.begins(pattern, text)) == [match.start() for match in pattern.finditer(text)]
