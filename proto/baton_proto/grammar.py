"""What an answer must look like: the grammar of a request, which the engine's masks enforce token by token."""

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from baton_proto.decoding import Count, Text

MAX_GRAMMAR_CHARS: Final = 256 * 1024  # of a grammar, all its texts together
MAX_ALTERNATIVES: Final = 4096  # of a choice

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag"]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]


class Grammar(Struct, frozen=True):
    """Checked by the router; every later hop trusts that it compiles."""

    kind: GrammarKind
    text: GrammarText = ""  # a JSON schema or structural tag (JSON), a regular expression, or EBNF
    choices: Annotated[tuple[GrammarText, ...], Meta(max_length=MAX_ALTERNATIVES)] = ()  # the answers of a choice
    around: GrammarText = ""  # Lark of the whole answer, in which @format is the grammar above; empty: nothing else
    held_bytes: Count = 0  # of the compiled form, as the router's helper measured them; 0: nobody has

    @property
    def num_chars(self) -> int:
        return len(self.text) + len(self.around) + sum(map(len, self.choices))


# --- between a router and its helper process, which compiles what callers sent ----------------------------------------


class GrammarCheck(Struct, frozen=True):
    check_id: Count
    grammar: Grammar


class GrammarVerdict(Struct, frozen=True):
    """Whether answers can follow a grammar."""

    check_id: Count
    problem: Text = ""  # what is wrong with the grammar; empty: nothing
    held_bytes: Count = 0  # of the compiled form
    failure: Text = ""  # why there is no verdict: the grammar is not to blame
