"""Token ids to text as they come: what the pieces add up to is what decoding all tokens at once gives.

Special tokens have no text, except those that are named as marks. A character whose bytes are
spread over tokens is given out with its last byte; bytes that are no UTF-8 become U+FFFD.

Why not `tokenizers.decoders.DecodeStream` (0.23): it cannot be flushed, so a text that ends within a character loses
its end (99 of 200 texts of emoji, cut anywhere), and it raises on byte tokens that are no UTF-8 (161 of 300 random
texts of a byte-fallback tokenizer). Per token, with 1 to 256 streams, byte-level text takes 0.7 us here and 0.7 us
there, in steps of eight tokens 0.13 us and 0.6 us; byte-fallback text takes 3.1 us here and 1.6 us there.
"""

import codecs
from collections.abc import Sequence, Set
from typing import Protocol

from router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
NO_MARKS: Set[int] = frozenset()
MAX_UNFINISHED = 8  # tokens; no character needs more than four bytes, so a longer wait means that it never was one


class Detokenizer(Protocol):
    @property
    def mid_character(self) -> bool:
        """The last token has left a character without its last bytes."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now."""

    def flush(self) -> str:
        """Returns the text that was waiting for more tokens; none follow."""


def make_detokenizer(tokenizer: Tokenizer, marks: Set[int] = NO_MARKS) -> Detokenizer:
    """`marks`: special tokens that are spelled out."""
    kind = ByteLevelDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, marks)


class ByteLevelDetokenizer:
    """Detokenizes byte-level BPE, where the text is the tokens' bytes in a row."""

    def __init__(self, tokenizer: Tokenizer, marks: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._cut = b""  # the begin of a character whose other bytes are still to come

    @property
    def mid_character(self) -> bool:
        return bool(self._cut)

    def push(self, token_ids: Sequence[int]) -> str:
        if self._marks and not self._marks.isdisjoint(token_ids):
            return "".join(map(self._push, token_ids))
        return self._decode(self._tokenizer.shown_bytes(token_ids))

    def flush(self) -> str:
        return self._decode(b"", final=True)

    def _push(self, token_id: int) -> str:
        spell = self._tokenizer.token_bytes
        shown = spell(token_id) if token_id in self._marks else self._tokenizer.shown_bytes((token_id,))
        return self._decode(shown)

    def _decode(self, shown: bytes, final: bool = False) -> str:
        """Does what an incremental decoder of `codecs` does, which is Python and takes four times as long."""
        data = self._cut + shown
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._cut = data[used:]
        return text


class WindowDetokenizer:
    """Detokenizes every other kind, where a token's text may depend on its neighbours: decodes a window of tokens with
    and without the new one and takes the difference.

    A run of byte tokens is given out when it ends, because one wrong byte changes the text of the whole run.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._shown: list[int] = []  # the last tokens whose text is out: context for the next
        self._waiting: list[int] = []

    @property
    def mid_character(self) -> bool:
        return bool(self._waiting) and self._tokenizer.decode(self._waiting).endswith(REPLACEMENT)

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push, token_ids))

    def flush(self) -> str:
        return self._difference(final=True)

    def _push(self, token_id: int) -> str:
        if token_id in self._marks:
            return self._difference(final=True) + self._tokenizer.token_text(token_id)
        if token_id in self._tokenizer.hidden_token_ids:
            return ""
        self._waiting.append(token_id)
        return "" if self._tokenizer.is_byte_fallback(token_id) else self._difference(final=False)

    def _difference(self, final: bool) -> str:
        before = self._tokenizer.decode(self._shown)
        text = self._tokenizer.decode(self._shown + self._waiting)
        if text.endswith(REPLACEMENT) and len(self._waiting) < MAX_UNFINISHED and not final:
            return ""
        self._shown, self._waiting = self._waiting or self._shown, []
        return text[len(before) :]
