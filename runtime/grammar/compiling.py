"""Makes a matcher for one vocabulary of a grammar, or says what is wrong with the grammar. The limits are counts, so
all machines refuse the same grammars.

Invariant: no process that must not die compiles what a helper has not survived: see `checker` and `helper`.
"""

from collections.abc import Mapping
from typing import Any, Final

import llguidance
import numpy as np

from baton_proto.grammar import Grammar
from runtime.grammar.bounds import MAX_WRITTEN_OUT, check_size, written_out
from runtime.grammar.faults import find_fault
from runtime.grammar.matcher import Matcher
from runtime.grammar.room import Compiled, GrammarRoom
from runtime.grammar.source import json_source, llguidance_source, longest_text, parsed
from runtime.grammar.words.vocabulary import Vocabulary

MAX_TEXT_CHARS: Final = 16 * 1024  # of a regular expression, EBNF, choice or text of a schema: a mask of one takes 5 ms
PROBED_TOKENS: Final = 4
# What one grammar may take.
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


def compiled(vocabulary: Vocabulary, grammar: Grammar) -> llguidance.LLMatcher:
    """Raises ValueError, which says what is wrong with the grammar and what to do."""
    check_size(grammar)
    if (longest := longest_text(grammar)) > MAX_TEXT_CHARS:
        raise ValueError(f"has a text of {longest} characters; at most {MAX_TEXT_CHARS} are allowed in one")
    if (size := max(map(written_out, (grammar.text, grammar.around)))) > MAX_WRITTEN_OUT:
        raise ValueError(f"has repeats that make {size} when written out; at most {MAX_WRITTEN_OUT} are allowed")
    try:
        source = llguidance_source(grammar, vocabulary.marks)
    except ValueError as error:
        problem = str(error)
        if "recursion limit" in problem:  # of a library that reads JSON
            problem = "is nested too deeply; give it fewer levels"
        raise ValueError(f"cannot be used: {problem}") from error
    matcher = _matcher(vocabulary, source)
    if matcher.is_error():
        raise ValueError(_reason(vocabulary, grammar, _plain(matcher.get_error())))
    if problem := _probed(vocabulary, matcher):
        raise ValueError(f"has no answer, or is too complex ({problem})")
    return matcher


def _probed(vocabulary: Vocabulary, matcher: llguidance.LLMatcher) -> str:
    """The problem that the beginning of an answer meets, if any. A later one ends the sequence that meets it."""
    probe, output = Matcher(Compiled(matcher, 0), vocabulary.ends, GrammarRoom()), list[int]()
    while len(output) <= PROBED_TOKENS and not probe.problem:
        allowed = np.flatnonzero(np.unpackbits(probe.mask(output, ends=False).view(np.uint8), bitorder="little"))
        if allowed[0] in vocabulary.eos_token_ids:
            break
        output.append(int(allowed[0]))
    return probe.problem


def _matcher(vocabulary: Vocabulary, source: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(vocabulary.tokens, source, log_level=0, limits=_LIMITS)


def _plain(error: str) -> str:
    return " ".join(error.split())


def _reason(vocabulary: Vocabulary, grammar: Grammar, problem: str) -> str:
    """What is wrong, and in a schema where."""
    if grammar.kind != "json_schema":
        return f"cannot be used: {problem:.500}"

    def error_of(schema: Mapping[str, Any]) -> str:
        try:
            return _plain(_matcher(vocabulary, json_source(schema)).get_error())
        except ValueError as error:
            return str(error)

    path, problem = find_fault(parsed(grammar.text), problem, error_of)
    if problem.startswith("Unimplemented keys"):
        return f"uses {problem.split(chr(34))[1]!r} at {path}, which is not supported; leave it out"
    return f"cannot be used at {path}: {problem.replace(_THEIR_WAY_OUT, 'use anyOf'):.500}"
