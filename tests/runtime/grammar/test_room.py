from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_proto.grammar import Grammar
from runtime.grammar import room as module
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.room import (
    MAX_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_KEPT_BYTES,
    TOKEN_BYTES,
    WORN_BYTES,
    Compiled,
    GrammarRoom,
)
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

MIB = 1024 * 1024
NOTHING: Any = None  # a matcher that nobody asks


class Heap:
    num_bytes = 0

    def __call__(self) -> int:
        return self.num_bytes


@pytest.fixture
def heap(monkeypatch: pytest.MonkeyPatch) -> Heap:
    heap = Heap()
    monkeypatch.setattr(module, "heap_bytes", heap)
    monkeypatch.setattr(module, "SHARE", inf)
    return heap


def kept(room: GrammarRoom, number: int, held_bytes: int) -> Compiled:
    compiled = Compiled(NOTHING, held_bytes)
    room.keep(Grammar("regex", str(number)), compiled)
    return compiled


def grow(room: GrammarRoom, heap: Heap, compiled: Compiled, num_bytes: int) -> None:
    with room.measured([compiled], 0):
        heap.num_bytes += num_bytes


def test_grammars_are_kept_by_their_bytes_and_the_oldest_go_first() -> None:
    room = GrammarRoom()
    for number in range(10):
        kept(room, number, 15 * MIB)
    is_kept = [room.find(Grammar("regex", str(number))) is not None for number in range(10)]
    assert is_kept == [False] * 8 + [True] * (MAX_KEPT_BYTES // (15 * MIB))


def test_a_grammar_that_has_grown_is_compiled_afresh_and_one_that_grows_on_ends_its_answers(heap: Heap) -> None:
    room = GrammarRoom()
    compiled = kept(room, 1, MIB)
    grow(room, heap, compiled, WORN_BYTES + 1)
    assert room.find(Grammar("regex", "1")) is None
    assert not compiled.problem
    grow(room, heap, compiled, MAX_GRAMMAR_BYTES)
    assert "more than 32 MiB" in compiled.problem


def test_of_grammars_that_are_too_large_together_the_largest_ends(heap: Heap) -> None:
    room = GrammarRoom()
    followed = [kept(room, number, 0) for number in range(8)]
    for compiled in followed:
        grow(room, heap, compiled, MAX_BYTES // 8 - MIB // 2)
    assert not any(compiled.problem for compiled in followed)
    assert room.is_short
    grow(room, heap, followed[3], 6 * MIB)
    assert [bool(compiled.problem) for compiled in followed] == [number == 3 for number in range(8)]


def test_long_answers_of_a_grammar_that_needs_no_more_states_go_on(heap: Heap) -> None:
    room = GrammarRoom()
    compiled = kept(room, 1, MIB)
    for _ in range(1000):
        with room.measured([compiled] * 256, 256):
            heap.num_bytes += 256 * TOKEN_BYTES
    assert room.find(Grammar("regex", "1")) is compiled
    assert not compiled.problem


def test_masks_that_make_a_grammar_grow_are_noticed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE", inf)
    matcher = GrammarCompiler(tiny_model, VOCAB_SIZE, EOS_TOKEN_IDS).matcher(Grammar("regex", ".*a.{20}b.*"))
    source, output = np.random.default_rng(1), list[int]()
    for _ in range(200):
        words = matcher.mask(output, ends=False)
        output.append(int(source.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")))))
    assert matcher.compiled.grown > MIB // 8  # the heap has room for a part of it
