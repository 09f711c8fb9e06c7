"""What an answer must look like: the grammar of a request, which the engine's masks enforce token by token."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

MAX_GRAMMAR_CHARS: Final = 256 * 1024  # of a grammar, all its texts together
MAX_ALTERNATIVES: Final = 4096  # of a choice

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]


class Grammar(Struct, frozen=True):
    """Checked by the router; every later hop trusts that it compiles."""

    kind: GrammarKind
    text: GrammarText = ""  # a JSON schema or structural tag (JSON), a regular expression, or EBNF
    choices: Annotated[tuple[GrammarText, ...], Meta(max_length=MAX_ALTERNATIVES)] = ()  # the answers of a choice

    @property
    def num_chars(self) -> int:
        return len(self.text) + sum(map(len, self.choices))
