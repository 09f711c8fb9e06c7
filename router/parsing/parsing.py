"""How the answers of a model, and of one request, are taken apart."""

import random
import string
from collections.abc import Mapping, Set

from msgspec import Struct

from router.parsing.call_writer import Schemas
from router.parsing.families import (
    REASONING_FAMILIES,
    REASONING_SIGNS,
    TOOL_FAMILIES,
    TOOL_SIGNS,
    ReasoningFamily,
    ToolFamily,
    recognised,
)
from router.parsing.parser import Parser

_dice = random.Random()  # ids are told apart by it, not secret
_ID_SIGNS = string.ascii_letters + string.digits


class Parsing(Struct, frozen=True):
    """Of one request."""

    tools: ToolFamily | None  # None: calls stay text
    reasoning: ReasoningFamily | None
    marks: Set[int]  # special tokens that the families use
    schemas: Schemas = {}
    in_reasoning: bool = False  # the prompt ends within the reasoning
    one_call: bool = False  # all but the first are dropped
    thinking_tokens: int | None = None  # after so many tokens of reasoning, `end_of_thinking` follows; None: no limit
    end_of_thinking: tuple[int, ...] = ()

    def parser(self) -> Parser:
        return Parser(self.tools, self.reasoning, _call_id, self.schemas, self.in_reasoning)


class ModelFamilies(Struct, frozen=True):
    """Of the served model. `marks`: text of each special token that the families use -> its id."""

    tool_name: str | None = None
    reasoning_name: str | None = None
    marks: Mapping[str, int] = {}

    @property
    def tools(self) -> ToolFamily | None:
        return TOOL_FAMILIES[self.tool_name] if self.tool_name else None

    @property
    def reasoning(self) -> ReasoningFamily | None:
        return REASONING_FAMILIES[self.reasoning_name] if self.reasoning_name else None


NO_FAMILIES = ModelFamilies()


def model_families(
    tool_parser: str, reasoning_parser: str, template: str, added_tokens: Mapping[str, int], special: Set[int]
) -> ModelFamilies:
    """The parsers are names, `none`, or `auto`: by the chat template and the added tokens, both of the model."""
    tool_name = _named(tool_parser) if tool_parser != "auto" else recognised(TOOL_SIGNS, template, added_tokens)
    by_signs = reasoning_parser == "auto"
    reasoning_name = recognised(REASONING_SIGNS, template, added_tokens) if by_signs else _named(reasoning_parser)
    families = ModelFamilies(tool_name, reasoning_name)
    texts: list[str] = []
    if families.tools is not None:
        texts += (*families.tools.opens, *families.tools.inner)
    if families.reasoning is not None:
        texts += (families.reasoning.opens, families.reasoning.closes, *families.reasoning.inner)
    marks = {text: added_tokens[text] for text in texts if added_tokens.get(text) in special}
    return ModelFamilies(tool_name, reasoning_name, marks)


def _call_id() -> str:
    """Mistral's chat templates take no other form than nine letters and digits."""
    return "".join(_dice.choices(_ID_SIGNS, k=9))


def _named(parser: str) -> str | None:
    return None if parser == "none" else parser
