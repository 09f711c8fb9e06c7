"""The tools of a chat, whatever protocol names them, and what they mean for its answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from baton_proto.grammar import Grammar
from router.parsing.call_grammars import call_grammar
from router.parsing.parsing import ModelFamilies, Parsing
from router.text.text_encoder import TokenIds
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

TAIL_TOKENS = 8  # of a prompt, in which a chat template opens the reasoning
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

SCHEMA_FIELD = "tools[{}].function.parameters"
ToolChoice = Literal["none", "auto", "required"]


class ToolUse(Struct, frozen=True):
    tools: Sequence[Mapping[str, Any]] = ()  # as OpenAI's API and chat templates write them
    choice: ToolChoice = "auto"
    named: str | None = None  # the one tool that must be called; with "required"
    parallel: bool = True  # more than one call may be made
    allowed: Collection[str] | None = None  # the tools that may be called; None: all
    strict: Collection[str] = ()  # tools whose calls match their schema, also with "auto"
    schema_field: str = SCHEMA_FIELD  # the caller's name of a tool's schema, with {} for the tool's number
    schema_fields: Sequence[str] = ()  # the same of each tool, where they are not simply numbered

    def schema_name(self, index: int) -> str:
        """The caller's name of a tool's schema."""
        return self.schema_fields[index] if self.schema_fields else self.schema_field.format(index)

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Of the tools that may be called."""
        functions = [tool["function"] for tool in self.tools]
        told = {each["name"]: each.get("parameters") or NO_PARAMETERS for each in functions}
        return {name: schema for name, schema in told.items() if self.allowed is None or name in self.allowed}


def check_tools(use: ToolUse, families: ModelFamilies, tokenizer: Tokenizer) -> None:
    """Raises InvalidRequestError when the model cannot have tools."""
    if not use.tools:
        return
    if not tokenizer.template_reads("tools"):
        raise InvalidRequestError("tools", "the model's chat template knows no tools: leave them out")
    if families.tools is None and use.choice != "none":
        way_out = "set router.tool_parser, or leave tools out"
        raise InvalidRequestError("tools", f"how the model writes calls of tools is not known; {way_out}")


def answer_form(
    use: ToolUse,
    families: ModelFamilies,
    tokenizer: Tokenizer,
    prompt: TokenIds,
    given: Grammar | None,
    thinking_tokens: int | None = None,
) -> tuple[Parsing | None, Grammar | None]:
    """How the answer is taken apart, and the grammar that makes it call a tool. An answer that follows the caller's
    own grammar has no reasoning. `thinking_tokens`: of reasoning, at most. Raises InvalidRequestError."""
    calls = families.tools if use.tools and use.choice != "none" else None
    reasoning = families.reasoning if given is None else None
    if calls is None and reasoning is None:
        return None, None
    in_reasoning = False
    if reasoning is not None:
        tail = tokenizer.decode(prompt[-TAIL_TOKENS:].tolist(), skip_special_tokens=False)
        in_reasoning = tail.rstrip().endswith(reasoning.opens)
    schemas = use.schemas() if calls is not None else {}
    grammar = None
    if calls is not None and use.choice == "required":
        if given is not None:
            raise InvalidRequestError("tool_choice", "contradicts the grammar of the answer: leave one of them out")
        wanted = [(name, schema) for name, schema in schemas.items() if use.named in (None, name)]
        text = call_grammar(families, wanted, use.parallel and use.named is None, in_reasoning)
        if text is None:
            problem = f"calls in the form {families.tool_name!r} cannot be enforced; use 'auto'"
            raise InvalidRequestError("tool_choice", problem)
        grammar = Grammar("ebnf", text)
    elif calls is not None and given is None and (use.strict or use.allowed is not None):
        grammar = _free_calls(use, families, schemas, in_reasoning)
    end: tuple[int, ...] = ()
    if reasoning is not None and thinking_tokens is not None:
        ending = reasoning.ends or f"\n{reasoning.closes}\n\n"
        end = tuple(tokenizer.encode(ending, add_special_tokens=False).tolist())
    marks = frozenset(families.marks.values())
    limit = thinking_tokens if end else None
    return Parsing(calls, reasoning, marks, schemas, in_reasoning, not use.parallel, limit, end), grammar


def _free_calls(
    use: ToolUse, families: ModelFamilies, schemas: Mapping[str, Mapping[str, Any]], in_reasoning: bool
) -> Grammar | None:
    """Text with calls of the tools that may be called; those of strict tools match their schemas. None: the form of
    the family's calls tells no call from a text. Raises InvalidRequestError when that matters."""
    wanted = [(name, schema if name in use.strict else ANY_OBJECT) for name, schema in schemas.items()]
    text = call_grammar(families, wanted, use.parallel, in_reasoning, free=True)
    if text is None and use.allowed is not None:
        problem = f"calls in the form {families.tool_name!r} cannot be kept to some of the tools; leave the others out"
        raise InvalidRequestError("tool_choice", problem)
    return None if text is None else Grammar("ebnf", text)
