"""Tokens of the parts of prompts that came before: system prompts, earlier turns of a chat.

Tokenizers cut a text at its special tokens first and tokenize what lies between two of them by itself. Therefore a text
is the sum of its segments, each from one special token to the next, and a segment's tokens depend on nothing else.
"""

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from router.text.text_encoder import TextEncoder, TokenIds

MAX_BYTES = 64 * 1024 * 1024  # of all segments that are kept: texts, tokens, and
PLACE_BYTES = 256  # what a segment takes besides: its place in the table, and the head of its array
WINDOW_CHARS = 64 * 1024  # of a search for special tokens, which takes a millisecond or two


@dataclass(slots=True)
class Unfinished:
    """A text on its way to tokens. `num_chars` counts the segments that must be tokenized, which takes the time."""

    segments: list[str]
    tokens: list[TokenIds | None]
    num_chars: int


class SegmentCache:
    """Shared by threads. The least recently used segment is dropped first."""

    def __init__(self, encode: TextEncoder, boundaries: "re.Pattern[str] | None", max_bytes: int = MAX_BYTES) -> None:
        """`boundaries` matches special tokens, see `boundary_pattern`; None: a text is one segment."""
        self._encode = encode
        self._boundaries = boundaries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[str, TokenIds] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, text: str, separator: str | None = None) -> Unfinished:
        """`separator`: cuts the text into parts that are tokenized one by one, and stands in none of them."""
        parts = [text] if separator is None else filter(None, text.split(separator))
        segments = [segment for part in parts for segment in self._segments(part)]
        with self._lock:
            tokens = [self._look_up(segment) for segment in segments]
        missing = (len(segment) for segment, known in zip(segments, tokens, strict=True) if known is None)
        return Unfinished(segments, tokens, sum(missing))

    def finish(self, text: Unfinished) -> TokenIds:
        """[num_tokens]. Raises InvalidRequestError for what cannot be UTF-8."""
        missing = [segment for segment, known in zip(text.segments, text.tokens, strict=True) if known is None]
        encoded = self._encode(missing, False) if missing else []
        with self._lock:
            for segment, tokens in zip(missing, encoded, strict=True):
                self._keep(segment, tokens)
        fresh = iter(encoded)
        parts = [next(fresh) if known is None else known for known in text.tokens]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)

    def _segments(self, text: str) -> list[str]:
        if self._boundaries is None:
            return [text]
        cuts = [start for start in begins(self._boundaries, text) if start]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def _look_up(self, segment: str) -> TokenIds | None:
        tokens = self._known.get(segment)
        if tokens is not None:
            self._known.move_to_end(segment)
        return tokens

    def _keep(self, segment: str, tokens: TokenIds) -> None:
        if segment in self._known:
            return
        self._known[segment] = tokens = tokens.copy()  # else it would keep those of all segments of its text
        self._num_bytes += kept_bytes(segment, tokens)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= kept_bytes(*self._known.popitem(last=False))


def kept_bytes(segment: str, tokens: TokenIds) -> int:
    """Bytes of memory that a segment takes."""
    return sys.getsizeof(segment) + tokens.nbytes + PLACE_BYTES


def begins(boundaries: "re.Pattern[str]", text: str) -> Iterator[int]:
    """Yields the places where special tokens begin. Because other threads wait for the end of each search, a long text
    is searched in windows; what begins in a window may end beyond it."""
    longest, end = len(boundaries.pattern), 0  # no token is longer than the pattern that lists them
    for window in range(0, len(text), WINDOW_CHARS):
        for match in boundaries.finditer(text, max(window, end), window + WINDOW_CHARS + longest):
            if match.start() >= window + WINDOW_CHARS:
                break
            yield match.start()
            end = match.end()


def boundary_pattern(added: Iterable[tokenizers.AddedToken]) -> "re.Pattern[str] | None":
    """Finds special tokens as a tokenizer does: from left to right, of several at one place the longest. None when
    there is none, or when one of them depends on what stands around it."""
    tokens = list(added)
    if not tokens or any(token.normalized or token.lstrip or token.single_word for token in tokens):
        return None
    by_length: Sequence[str] = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)))
