"""Guesses from a sequence's own tokens, against a search through all of them."""

import random

import hypothesis.strategies as st
from hypothesis import given

from baton_proto.sampling import SamplingParams
from engine.drafts.ngrams import MOST_TOKENS, SIZES, NgramDrafter, NgramIndex
from engine.sequences.sequence import PENDING, Sequence


def last_before(tokens: list[int], size: int) -> int | None:
    """Where the n-gram that `tokens` ends with ended last before."""
    wanted = tokens[len(tokens) - size :]
    ends = range(len(tokens) - 1, size - 1, -1)
    return next((end for end in ends if tokens[end - size : end] == wanted), None)


def drafted(tokens: list[int], most: int) -> list[int]:
    sequence = Sequence("r", tokens, len(tokens), SamplingParams(max_tokens=8))
    [guess] = NgramDrafter().draft([(sequence, most)])
    return guess


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    begins=st.integers(0, 80),
    size=st.integers(1, 4),
    steps=st.lists(st.integers(1, 5)),
)
def test_the_last_place_is_found_however_many_tokens_come_at_once(
    tokens: list[int], begins: int, size: int, steps: list[int]
) -> None:
    index, end = NgramIndex(size, len(tokens)), begins
    for step in [*steps, len(tokens)]:
        end = min(end + step, len(tokens))
        expected = last_before(tokens[:end], size) if end >= size else None
        assert index.find(tokens, end) == expected


def test_of_long_texts_most_ngrams_are_found_and_none_in_the_wrong_place() -> None:
    """Two that share a slot hide each other."""
    source = random.Random(1)
    text = [source.randrange(50_000) for _ in range(MOST_TOKENS // 2 - 100)]
    hits = 0
    for place in range(200, 400):
        tokens = text + text[place - 5 : place]
        found = NgramIndex(5, len(tokens)).find(tokens, len(tokens))
        assert found in (place, None)
        hits += found == place
    assert hits > 130


def test_the_beginning_of_a_longer_text_is_forgotten() -> None:
    tokens = [*range(1, 6), *[0] * MOST_TOKENS, *range(1, 6)]
    assert NgramIndex(5, len(tokens)).find(tokens, len(tokens)) is None
    assert NgramIndex(5, len(tokens)).find(tokens[2:], len(tokens) - 2) is None


def test_the_longest_ngram_counts_and_pending_tokens_do_not() -> None:
    short, long = min(SIZES), max(SIZES)
    far, near = [*range(long), 77], [99, *range(long - short, long), 88]
    assert drafted([*far, *near, *range(long)], 1) == [77]
    assert drafted([*far, *near, 5, *range(long - short, long)], 1) == [88]
    sequence = Sequence("r", [*far, *range(long), PENDING], long, SamplingParams(max_tokens=20))
    sequence.num_pending_tokens = 1
    assert NgramDrafter().draft([(sequence, 1)]) == [[77]]


def test_what_repeats_itself_goes_on() -> None:
    assert drafted([1, 2, 3, 4] * 3, 10) == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert drafted(list(range(20)), 10) == []


def test_a_forgotten_sequence_leaves_nothing() -> None:
    drafter = NgramDrafter()
    sequence = Sequence("r", [1] * 9, 9, SamplingParams(max_tokens=8))
    drafter.draft([(sequence, 4)])
    drafter.forget(sequence)
    assert drafter._of == {}
