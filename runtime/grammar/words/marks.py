"""Marks: the texts of a model's added tokens, as grammars name them.

An answer may write a mark as its one token, or with other tokens as any text. Free text has no barred token, so where
one may stand, a grammar names it. Every other added token is matched by its text, too.
"""

import json
import re
from collections.abc import Mapping, Set
from functools import cached_property
from typing import Final

from msgspec import Struct

# Each alternative takes all that it can and needs no end, so the time grows with the text.
_STRING_OR_NAME: Final = re.compile(r'//[^\n]*|"(?:[^"\\]|\\.)*+"?|/(?:[^/\\\n]|\\.)*+/?|<[^<>\s]++>?', re.DOTALL)


class Marks(Struct, frozen=True, dict=True):
    ids: Mapping[str, int] = {}  # text of an added token -> its id
    barred: Set[int] = frozenset()  # those that no text has

    def literal(self, text: str) -> str:
        """`text` in llguidance's Lark, each mark in it in either spelling."""
        return self._written(text, "(<[{}]> | {})")

    def barred_literal(self, text: str) -> str | None:
        """`text` in Lark, each mark in it as a token; None: it does not begin with a barred one."""
        begin = self._pattern.match(text)
        return self._written(text, "<[{}]>") if begin and self.ids[begin[0]] in self.barred else None

    def numbered(self, lark: str) -> str:
        """A grammar in Lark whose names of tokens, such as <think>, are numbers instead."""
        return _STRING_OR_NAME.sub(lambda part: f"<[{self.ids[part[0]]}]>" if part[0] in self.ids else part[0], lark)

    def _written(self, text: str, form: str) -> str:
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(form.format(self.ids[p], json.dumps(p)) if p in self.ids else json.dumps(p) for p in parts)

    @cached_property
    def _pattern(self) -> "re.Pattern[str]":
        """Where several begin at the same character, the longest is found."""
        return re.compile(
            f"({'|'.join(map(re.escape, sorted(self.ids, key=len, reverse=True)))})" if self.ids else "((?!))"
        )
