"""The tools of a chat, whatever protocol names them, and what they mean for its answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from baton_proto.grammar import Grammar
from router.parsing.call_grammars import Rest, Thought, answer_grammar
from router.parsing.families import ReasoningFamily
from router.parsing.parsing import ModelFamilies, Parsing
from router.text.chat_template import Ending, Message
from router.text.plain_tools import begin_plain_chat
from router.text.segment_cache import Unfinished
from router.text.text_encoder import TokenIds
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

TAIL_TOKENS = 8  # of a prompt, in which a chat template opens the reasoning
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

ToolChoice = Literal["none", "auto", "required"]


class ToolUse(Struct, frozen=True):
    tools: Sequence[Mapping[str, Any]] = ()  # as OpenAI's API and chat templates write them
    choice: ToolChoice = "auto"
    named: str | None = None  # the one tool that must be called; with "required"
    parallel: bool = True  # more than one call may be made
    allowed: Collection[str] | None = None  # the tools that may be called; None: all
    strict: Collection[str] = ()  # tools whose calls match their schema, also with "auto"
    schema_fields: Sequence[str] = ()  # the caller's name of each tool's schema

    @property
    def told(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the prompt tells the model of."""
        return () if self.choice == "none" else self.tools

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Name of each tool that may be called -> the schema of its arguments."""
        functions = [tool["function"] for tool in self.tools]
        told = {each["name"]: each.get("parameters") or NO_PARAMETERS for each in functions}
        return {name: schema for name, schema in told.items() if self.allowed is None or name in self.allowed}


def check_tools(use: ToolUse, families: ModelFamilies) -> None:
    """Raises InvalidRequestError when the model cannot have tools."""
    if not use.told:
        return
    if families.tools is None:
        way_out = "set router.tool_parser, or leave tools out"
        raise InvalidRequestError("tools", f"how the model writes calls of tools is not known; {way_out}")
    if not families.tells_tools and not families.tools.shown:
        problem = f"the model's chat template knows no tools, nor does it tell calls in the form {families.tool_name!r}"
        raise InvalidRequestError("tools", f"{problem}: set router.tool_parser to auto, or leave tools out")


def begin_chat(
    use: ToolUse | None,
    families: ModelFamilies,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    max_chars: int,
    ending: Ending = "answer",
) -> Unfinished:
    """The prompt with its tools, which `check_tools` has let through. Raises InvalidRequestError."""
    tools = [] if use is None else list(use.told)
    if tools and families.tools is not None and not families.tells_tools:
        return begin_plain_chat(tokenizer, families.tools.shown, messages, tools, variables, max_chars, ending)
    return tokenizer.begin_chat(messages, {**variables, "tools": tools} if tools else variables, max_chars, ending)


def answer_form(
    use: ToolUse,
    families: ModelFamilies,
    tokenizer: Tokenizer,
    prompt: TokenIds,
    given: Grammar | None,
    thinking_tokens: int | None = None,
    continues: bool = False,
) -> tuple[Parsing | None, Grammar | None]:
    """How the answer is taken apart, and the grammar that it follows: the thought that it may begin with, then calls of
    tools or what `given`, the caller's own grammar, says. `thinking_tokens`: of reasoning, at most. `continues`: the
    prompt ends within what the assistant says. Raises InvalidRequestError."""
    calls, reasoning = families.tools if use.told else None, families.reasoning
    if calls is None and reasoning is None:
        return None, given
    thought = _thought(reasoning, tokenizer, prompt)
    thought = "has ended" if continues and thought == "may begin" else thought
    schemas = use.schemas() if calls is not None else {}
    grammar = _grammar(use, families, schemas, thought, given)
    end: tuple[int, ...] = ()
    if reasoning is not None and thinking_tokens is not None:
        ending = reasoning.ends or f"\n{reasoning.closes}\n\n"
        end = tuple(tokenizer.encode(ending, add_special_tokens=False).tolist())
    limit, begun = thinking_tokens if end else None, thought == "has begun"
    shown = families.marks.barred
    formatted = given is not None and use.choice != "required"
    return Parsing(calls, reasoning, shown, schemas, begun, formatted, not use.parallel, limit, end), grammar


def _thought(reasoning: ReasoningFamily | None, tokenizer: Tokenizer, prompt: TokenIds) -> Thought:
    if reasoning is None:
        return "has ended"
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:].tolist(), skip_special_tokens=False).rstrip()
    if tail.endswith(reasoning.opens):
        return "has begun"
    return "has ended" if tail.endswith(reasoning.closes) else "may begin"


def _grammar(
    use: ToolUse,
    families: ModelFamilies,
    schemas: Mapping[str, Mapping[str, Any]],
    thought: Thought,
    given: Grammar | None,
) -> Grammar | None:
    """Raises InvalidRequestError when the calls that are wanted cannot be enforced."""
    if use.told and use.choice == "required":
        wanted = [(name, schema) for name, schema in schemas.items() if use.named in (None, name)]
        text = answer_grammar(families, wanted, use.parallel and use.named is None, thought, "calls")
        if text is None:
            problem = f"calls in the form {families.tool_name!r} cannot be enforced; use 'auto'"
            raise InvalidRequestError("tool_choice", problem)
        return Grammar("ebnf", text)
    may = [(name, schema if name in use.strict else ANY_OBJECT) for name, schema in schemas.items()]
    if given is not None:
        rest: Rest = "calls or format" if may else "format"
        around = answer_grammar(families, may, use.parallel, thought, rest)
        return given if around is None else msgspec.structs.replace(given, around=around)
    if not may or (not use.strict and use.allowed is None):
        return None
    text = answer_grammar(families, may, use.parallel, thought, "text with calls")
    if text is None and use.allowed is not None:
        problem = f"calls in the form {families.tool_name!r} cannot be kept to some of the tools; leave the others out"
        raise InvalidRequestError("tool_choice", problem)
    return None if text is None else Grammar("ebnf", text)
