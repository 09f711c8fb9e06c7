"""Compiles grammars for one model's vocabulary and gives out matchers, for processes whose answers follow them.

Any thread may call; llguidance lets other threads run meanwhile. A lane of its own compiles for event loops.
Invariant: of callers who are not trusted, a grammar comes here after a helper process has compiled it (`checker`).
"""

import threading
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Final

from baton_proto.grammar import Grammar
from runtime.errors import InvalidRequestError
from runtime.grammar.compiling import compiled
from runtime.grammar.deep_stack import SAFE_STACK_BYTES, on_deep_stack
from runtime.grammar.matcher import Matcher
from runtime.grammar.room import Compiled, GrammarRoom
from runtime.grammar.words.vocabulary import Vocabulary
from runtime.side_lane import SideLane

TIMEOUT_S: Final = 10.0  # to wait for a thread and to compile
THREADS: Final = 4  # one more than what a router lets through at once
MAX_WAITING: Final = 256


class GrammarCompiler:
    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`folder`: the model's, in Hugging Face form. `vocab_size`: the model's."""
        self._model = folder, vocab_size, eos_token_ids
        self._room = GrammarRoom()
        self._lane = SideLane(THREADS, MAX_WAITING, "grammars")
        self._reading = threading.Lock()

    def read_vocabulary(self) -> None:
        """Reads it now rather than with the first grammar. Holds Python's lock for up to a second. Raises
        ModelError."""
        with self._reading:
            _ = self._vocabulary

    def matcher(self, grammar: Grammar, field: str = "grammar") -> Matcher:
        """A fresh matcher. Raises InvalidRequestError, which says what is wrong with `field`, and ModelError."""
        known = self._room.find(grammar)
        if known is None:
            self.read_vocabulary()
            try:
                inner = on_deep_stack(lambda: compiled(self._vocabulary, grammar), SAFE_STACK_BYTES)
            except ValueError as error:
                raise InvalidRequestError(field, str(error)) from None
            known = Compiled(inner, grammar.held_bytes or grammar.num_chars)
            self._room.keep(grammar, known)
        return self._fresh(known)

    async def matcher_soon(
        self,
        grammar: Grammar,
        field: str = "grammar",
        deadline_s: float | None = None,
        lane: SideLane | None = None,
    ) -> Matcher:
        """matcher() for event loops: what is not kept is compiled in `lane`, or else in our own. `deadline_s`: on
        time.monotonic(). Also raises OverloadedError, UnavailableError and DeadlineError."""
        if known := self._room.find(grammar):
            return self._fresh(known)
        lane = lane or self._lane
        late = "a grammar was not compiled"
        return await lane.run_within(TIMEOUT_S, deadline_s, late, self.matcher, grammar, field)

    async def check_soon(
        self, grammar: Grammar, name: str, deadline_s: float | None = None, lane: SideLane | None = None
    ) -> Grammar:
        """Checks as GrammarChecker does, in this process."""
        await self.matcher_soon(grammar, name, deadline_s, lane)
        return grammar

    def _fresh(self, known: Compiled) -> Matcher:
        return Matcher(known, self._vocabulary.ends, self._room)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(*self._model)
