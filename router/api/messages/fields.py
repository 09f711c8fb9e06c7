"""The body of POST /v1/messages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import Raw, Struct

from baton_proto.grammar import Grammar
from router.api.dialects.extensions import ExtendedBody, with_known
from router.api.dialects.json_body import ABSENT
from router.api.messages.blocks import Block, Conversation, TextBlock, Turn, blocks_text, keeps_s
from router.api.messages.editing import ContextManagement, Edit
from router.api.wishes.cache_hints import CacheControl
from router.api.wishes.names import Name
from router.api.wishes.sampling_options import Options
from router.api.wishes.structured_output import schema_grammar
from router.api.wishes.tool_use import ToolChoice as Choice, ToolUse
from router.api.wishes.tools import check_distinct, check_function, check_named, plain_tool, read_tools
from router.api.wishes.validation import MAX_MESSAGES, Chat, check_thinking
from router.text.chat_template import Ending
from runtime.errors import InvalidRequestError, shown

CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
THINKING: Mapping[str, bool | None] = {"enabled": True, "adaptive": None, "between_tools": None, "disabled": False}
"""Type of `thinking` -> `enable_thinking` of the chat template; None: the template's own choice."""


class ToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name
    budget_tokens: int | None = None
    display: Name | None = None  # without effect: thinking is told in full


class Format(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name
    schema: Any = None


class OutputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Name | None = None  # goes to the chat template
    format: Format | None = None

    def grammar(self) -> tuple[Grammar, str] | None:
        """The grammar and the name of its field. Raises InvalidRequestError."""
        if self.format is None:
            return None
        if self.format.type != "json_schema":
            raise InvalidRequestError("output_config.format.type", "must be 'json_schema'")
        name = "output_config.format.schema"
        return schema_grammar(name, self.format.schema), name


NOT_SERVED: Mapping[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
WITHOUT_EFFECT = (
    "metadata",
    "service_tier",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
    "diagnostics",
)
if TYPE_CHECKING:
    _KnownFields = ExtendedBody
else:
    _KnownFields = with_known(ExtendedBody, NOT_SERVED, WITHOUT_EFFECT)


class CountBody(_KnownFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens, and what POST /v1/messages has in common with it."""

    inner: ClassVar[Mapping[str, type[Struct]]] = {
        "messages": Turn,
        "content": Block,
        "system": TextBlock,
        "tool_choice": ToolChoice,
        "thinking": Thinking,
        "output_config": OutputConfig,
        "format": Format,
        "context_management": ContextManagement,
        "edits": Edit,
    }
    messages: Sequence[Turn]
    system: str | Sequence[TextBlock] | None = None
    tools: Raw = ABSENT
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None

    def keeps_s(self) -> Iterator[float]:
        if self.cache_control is not None:
            yield self.cache_control.keep_s("cache_control")
        yield from keeps_s("system", self.system)
        for i, turn in enumerate(self.messages):
            yield from keeps_s(f"messages[{i}].content", turn.content)
        for i, tool in enumerate(read_tools(self.tools)):
            if (mark := tool.get("cache_control")) is not None:
                where = f"tools[{i}].cache_control"
                yield _cache_control(where, mark).keep_s(where)

    def chat(self) -> Chat:
        """Raises InvalidRequestError."""
        conversation = Conversation()
        if self.context_management is not None:
            self.context_management.check()
        if self.system:
            conversation.messages.append({"role": "system", "content": blocks_text("system", self.system)})
        for i, turn in enumerate(self.messages):
            conversation.add(f"messages[{i}]", turn)
        messages = conversation.messages
        if (num := len(messages)) > MAX_MESSAGES:
            raise InvalidRequestError("messages", f"makes {num} messages; at most {MAX_MESSAGES} are allowed")
        continued = bool(messages) and messages[-1]["role"] == "assistant"
        if continued and messages[-1].get("tool_calls"):
            raise InvalidRequestError("messages", "ends with a call of a tool; its result has to follow")
        size = memoryview(self.tools).nbytes + memoryview(self.chat_template_kwargs).nbytes
        size += conversation.argument_bytes
        ending: Ending = "continue" if continued else "answer"
        return Chat(messages, self._template_variables(), size, self._tool_use(), self._thinking_tokens(), ending)

    def _thinking_tokens(self) -> int | None:
        budget = (
            None if self.thinking is None else check_thinking("thinking.budget_tokens", self.thinking.budget_tokens)
        )
        return self.thinking_tokens() if budget is None else budget

    def _template_variables(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            told["reasoning_effort"] = self.output_config.effort
        if self.thinking is not None:
            if self.thinking.type not in THINKING:
                problem = f"is {shown(self.thinking.type)}, must be one of {', '.join(THINKING)}"
                raise InvalidRequestError("thinking.type", problem)
            enabled = THINKING[self.thinking.type]
            told |= {} if enabled is None else {"enable_thinking": enabled}
        return self.variables(told)

    def _tool_use(self) -> ToolUse:
        tools, names, strict = [], [], []
        for i, tool in enumerate(read_tools(self.tools)):
            if tool.get("type") not in (None, "custom"):
                problem = f"is {shown(tool['type'])}, must be 'custom': the service runs no tools of its own"
                raise InvalidRequestError(f"tools[{i}].type", problem)
            names.append(check_function(f"tools[{i}]", tool, "input_schema"))
            tools.append(plain_tool(names[-1], tool.get("description"), tool.get("input_schema")))
            strict += names[-1:] if tool.get("strict") is True else []
        check_distinct("tools[{}].name", names)
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type not in CHOICES:
            problem = f"is {shown(choice.type)}, must be one of {', '.join(CHOICES)}"
            raise InvalidRequestError("tool_choice.type", problem)
        if choice.type == "any" and not names:
            raise InvalidRequestError("tool_choice", "is 'any' and there are no tools")
        named = check_named("tool_choice.name", choice.name, names) if choice.type == "tool" else None
        return ToolUse(
            tools,
            CHOICES[choice.type],
            named,
            not choice.disable_parallel_tool_use,
            strict=strict,
            schema_fields=[f"tools[{i}].input_schema" for i in range(len(tools))],
        )


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """POST /v1/messages"""

    max_tokens: int
    stop_sequences: Sequence[str] | None = None

    def options(self) -> Options:
        """Raises InvalidRequestError."""
        given, names = self.sampled() | {"max_tokens": self.max_tokens}, {"stop": "stop_sequences"}
        if self.output_config is not None and (found := self.output_config.grammar()):
            given["grammar"], names["grammar"] = found
        return Options(given=given, names=names, stop=self.stop_sequences or (), cuts_max_tokens=True)


def _cache_control(where: str, value: Any) -> CacheControl:
    try:
        return msgspec.convert(value, CacheControl)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(where, str(error)) from error
