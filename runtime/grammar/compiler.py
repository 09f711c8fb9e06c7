"""Compiles grammars for one model's vocabulary, within bounds that hold for hostile ones.

Any thread may call; llguidance lets other threads run meanwhile. A lane of its own compiles for event loops.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import llguidance
import numpy as np
import structlog
import tokenizers

from baton_proto.grammar import MAX_GRAMMAR_CHARS, Grammar
from runtime.errors import DeadlineError, InvalidRequestError, ModelError
from runtime.grammar.faults import find_fault
from runtime.grammar.matcher import EndTokens, Matcher
from runtime.grammar.repeats import MAX_WRITTEN_OUT, written_out
from runtime.grammar.source import json_source, llguidance_source, longest_text, parsed
from runtime.side_lane import SideLane

log = structlog.get_logger()

TIMEOUT_S: Final = 10.0  # to wait for a thread and to compile
MAX_TEXT_CHARS: Final = 16 * 1024  # of a regular expression, EBNF, choice or text of a schema: a mask of one takes 5 ms
PROBED_TOKENS: Final = 4
THREADS: Final = 2
MAX_WAITING: Final = 256
MAX_KEPT: Final = 64
MAX_KEPT_CHARS: Final = 4 * MAX_GRAMMAR_CHARS  # of their texts
# What one grammar may take. Each bound is a count, so all machines refuse the same grammars.
_LIMITS = llguidance.LLParserLimits(
    max_grammar_size=10_000,  # 0.1 s
    initial_lexer_fuel=400_000,  # 50 per us
    step_lexer_fuel=60_000,  # 14 per us, so a mask takes 5 ms at most
    step_max_items=20_000,  # 10 ms
    max_items_in_row=6_000,
    max_lexer_states=20_000,  # 2 kB each
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_THEIR_WAY_OUT = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class GrammarCompiler:
    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`folder`: the model's, in Hugging Face form; read when the first grammar comes. `vocab_size`: the model's."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._ends = EndTokens(eos_token_ids, -(-vocab_size // 32))
        self._kept: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._lane = SideLane(THREADS, MAX_WAITING, "grammars")
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()

    def matcher(self, grammar: Grammar, field: str = "grammar") -> Matcher:
        """A fresh matcher. Raises InvalidRequestError, which says what is wrong with `field`, and ModelError."""
        compiled = self._known(grammar)
        if compiled is None:
            compiled = self._compile(grammar, field)
            self._keep(grammar, compiled)
        return self._fresh(compiled)

    async def matcher_soon(
        self,
        grammar: Grammar,
        field: str = "grammar",
        deadline_s: float | None = None,
        lane: SideLane | None = None,
    ) -> Matcher:
        """matcher() for event loops: what is not kept is compiled in `lane`, or else in our own. `deadline_s`: on
        time.monotonic(). Also raises OverloadedError, UnavailableError and DeadlineError."""
        if compiled := self._known(grammar):
            return self._fresh(compiled)
        own_s = time.monotonic() + TIMEOUT_S
        try:
            return await (lane or self._lane).run(min(own_s, deadline_s or own_s), self.matcher, grammar, field)
        except DeadlineError:
            if deadline_s is not None and deadline_s < own_s:
                raise
            problem = f"was not compiled within {TIMEOUT_S:.0f} s; make it simpler, or try again later"
            raise InvalidRequestError(field, problem) from None

    def _known(self, grammar: Grammar) -> llguidance.LLMatcher | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _fresh(self, compiled: llguidance.LLMatcher) -> Matcher:
        return Matcher(compiled.deep_copy(), self._ends)

    def _compile(self, grammar: Grammar, field: str) -> llguidance.LLMatcher:
        if grammar.num_chars > MAX_GRAMMAR_CHARS:
            problem = f"has {grammar.num_chars} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
            raise InvalidRequestError(field, problem)
        if (longest := longest_text(grammar)) > MAX_TEXT_CHARS:
            problem = f"has a text of {longest} characters; at most {MAX_TEXT_CHARS} are allowed in one"
            raise InvalidRequestError(field, problem)
        if (size := written_out(grammar.text)) > MAX_WRITTEN_OUT:
            problem = f"has repeats that make {size} when written out; at most {MAX_WRITTEN_OUT} are allowed"
            raise InvalidRequestError(field, problem)
        try:
            source = llguidance_source(grammar)
        except ValueError as error:
            raise InvalidRequestError(field, f"cannot be used: {error}") from error
        with self._vocabulary_lock:
            vocabulary = self._vocabulary
        compiled = _compiled(vocabulary, source)
        if compiled.is_error():
            raise InvalidRequestError(field, _reason(vocabulary, grammar, _plain(compiled.get_error())))
        if problem := self._probed(compiled):
            raise InvalidRequestError(field, f"has no answer, or is too complex ({problem})")
        return compiled

    def _probed(self, compiled: llguidance.LLMatcher) -> str:
        """The problem that the beginning of an answer meets, if any. A later one ends the sequence that meets it."""
        probe, output = self._fresh(compiled), list[int]()
        while len(output) <= PROBED_TOKENS and not probe.problem:
            allowed = np.flatnonzero(np.unpackbits(probe.mask(output, ends=False).view(np.uint8), bitorder="little"))
            if allowed[0] in self._eos_token_ids:
                break
            output.append(int(allowed[0]))
        return probe.problem

    def _keep(self, grammar: Grammar, compiled: llguidance.LLMatcher) -> None:
        with self._lock:
            self._kept[grammar] = compiled
            while len(self._kept) > MAX_KEPT or sum(kept.num_chars for kept in self._kept) > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        try:
            text = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json")).to_str()
            return llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except Exception as error:  # both libraries raise nothing narrower
            raise ModelError(str(self._folder), f"no grammar can be followed with its tokenizer: {error}") from error


def _compiled(vocabulary: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(vocabulary, source, log_level=0, limits=_LIMITS)


def _plain(error: str) -> str:
    return " ".join(error.split())


def _reason(vocabulary: llguidance.LLTokenizer, grammar: Grammar, problem: str) -> str:
    """What is wrong, and in a schema where."""
    if grammar.kind != "json_schema":
        return f"cannot be used: {problem:.500}"

    def error_of(schema: Mapping[str, Any]) -> str:
        try:
            return _plain(_compiled(vocabulary, json_source(schema)).get_error())
        except ValueError as error:
            return str(error)

    path, problem = find_fault(parsed(grammar.text), problem, error_of)
    if problem.startswith("Unimplemented keys"):
        return f"uses {problem.split(chr(34))[1]!r} at {path}, which is not supported; leave it out"
    return f"cannot be used at {path}: {problem.replace(_THEIR_WAY_OUT, 'use anyOf'):.500}"
