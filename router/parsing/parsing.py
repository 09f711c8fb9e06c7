"""Rules by which the answers of a model, and of one request, are taken apart."""

from collections.abc import Callable, Mapping, Set

from msgspec import Struct

from router.parsing.call_writer import Schemas
from router.parsing.families import (
    PLAIN_FAMILY,
    REASONING_FAMILIES,
    REASONING_SIGNS,
    TOOL_FAMILIES,
    TOOL_SIGNS,
    ReasoningFamily,
    ToolFamily,
    recognised,
)
from router.parsing.parser import Parser
from runtime.grammar.words.marks import Marks


class Parsing(Struct, frozen=True):
    """The rules of one request."""

    tools: ToolFamily | None  # None: calls stay text
    reasoning: ReasoningFamily | None
    marks: Set[int]  # tokens of the families that texts hide, which this answer's text has to show
    schemas: Schemas = {}
    in_reasoning: bool = False  # the prompt ends within the reasoning
    formatted: bool = False  # what is neither reasoning nor calls is of the caller's grammar, and has no marks
    one_call: bool = False  # all but the first are dropped
    thinking_tokens: int | None = None  # after so many tokens of reasoning, `end_of_thinking` follows; None: no limit
    end_of_thinking: tuple[int, ...] = ()

    def parser(self, new_id: Callable[[], str]) -> Parser:
        """`new_id`: of the next call."""
        return Parser(self.tools, self.reasoning, new_id, self.schemas, self.in_reasoning, self.formatted)


class ModelFamilies(Struct, frozen=True):
    """The families of the served model."""

    tool_name: str | None = None
    reasoning_name: str | None = None
    marks: Marks = Marks()  # the added tokens that the families use
    tells_tools: bool = True  # the chat template does; else router/text/plain_tools.py has to

    @property
    def tools(self) -> ToolFamily | None:
        return TOOL_FAMILIES[self.tool_name] if self.tool_name else None

    @property
    def reasoning(self) -> ReasoningFamily | None:
        return REASONING_FAMILIES[self.reasoning_name] if self.reasoning_name else None


NO_FAMILIES = ModelFamilies()


def model_families(
    tool_parser: str,
    reasoning_parser: str,
    template: str,
    tells_tools: bool,
    added_tokens: Mapping[str, int],
    hidden: Set[int],
) -> ModelFamilies:
    """The parsers are names, `none`, or `auto`: by the chat template and the added tokens, both of the model.
    `tells_tools`: the template does; `hidden`: the added tokens that texts hide."""
    tool_name = _named(tool_parser) if tool_parser != "auto" else recognised(TOOL_SIGNS, template, added_tokens)
    if tool_name is None and tool_parser == "auto" and template and not tells_tools:
        tool_name = PLAIN_FAMILY
    by_signs = reasoning_parser == "auto"
    reasoning_name = recognised(REASONING_SIGNS, template, added_tokens) if by_signs else _named(reasoning_parser)
    families = ModelFamilies(tool_name, reasoning_name)
    texts: list[str] = []
    if families.tools is not None:
        texts += (*families.tools.opens, *families.tools.inner)
    if families.reasoning is not None:
        texts += (families.reasoning.opens, families.reasoning.closes, *families.reasoning.inner)
    ids = {text: added_tokens[text] for text in texts if text in added_tokens}
    marks = Marks(ids, hidden & set(ids.values()))
    return ModelFamilies(tool_name, reasoning_name, marks, tells_tools)


def _named(parser: str) -> str | None:
    return None if parser == "none" else parser
