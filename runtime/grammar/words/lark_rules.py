"""The rules of one grammar in llguidance's Lark, as they are written."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from runtime.grammar.schemas import enforced
from runtime.grammar.words.marks import Marks

ANY_TEXT: Final = "/(.|\\n)*/"
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{0,16}"  # bounded: a model that writes nothing else would never end
JSON_OPTIONS: Final[Any] = {"whitespace_pattern": WHITESPACE}


class LarkRules:
    """Names of rules and terminals are its own; whatever it returns may stand in the body of a rule."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.lines: list[str] = []

    def rule(self, body: str, attribute: str = "") -> str:
        return self._line(f"rule_{len(self.lines)}", attribute, body)

    def literal(self, text: str) -> str:
        return self.marks.literal(text)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Raises ValueError for what cannot be followed exactly."""
        return self.rule("%json " + json.dumps({**enforced(schema), "x-guidance": JSON_OPTIONS}))

    def text(self) -> str:
        return self.rule(ANY_TEXT)

    def text_without(self, mark: str) -> str:
        return self._terminal(_without(mark))

    def text_before(self, end: str, terminals: Sequence[str]) -> str:
        """A text that matches all `terminals`, and the end behind it: one terminal, because one takes all it can."""
        return self._terminal(f"({' & '.join((_without(end.strip()), *terminals))}) {json.dumps(end)}")

    def text_until(self, end: str) -> str:
        """A text and what ends it, the first that comes, in either spelling."""
        spelled = self.rule(ANY_TEXT, f"[suffix={json.dumps(end)}]")
        token = self.marks.barred_literal(end)
        return spelled if token is None else f"({spelled} | {self.text()} {token})"

    def _terminal(self, body: str) -> str:
        return self._line(f"TEXT_{len(self.lines)}", "", body)

    def _line(self, name: str, attribute: str, body: str) -> str:
        self.lines.append(f"{name}{attribute}: {body}")
        return name


def _without(text: str) -> str:
    return f"{ANY_TEXT} & ~/(.|\\n)*{_escaped(text)}(.|\\n)*/"


def _escaped(text: str) -> str:
    """As a regular expression of llguidance, in which escaped angle brackets are no brackets."""
    return re.sub(r"([\[\]|()/.*+?{}^$\\])", r"\\\1", text)
