"""What POST /v1/responses takes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw, Struct

from baton_proto.grammar import Grammar
from router.api.extensions import ExtendedBody
from router.api.http.openai_fields import ABSENT, RETENTIONS_S, CacheOptions, retention_s, session_keep_s
from router.api.http.openai_types import thinking_variables, verbosity_variables
from router.api.names import Name
from router.api.openai_tools import (
    allowed_tools,
    check_distinct,
    check_function,
    check_named,
    check_some,
    plain_tool,
    read_tools,
)
from router.api.responses.items import Conversation, Item, Part
from router.api.sampling_options import Options
from router.api.structured_output import schema_grammar
from router.api.tool_use import ToolChoice, ToolUse
from runtime.errors import InvalidRequestError, shown

LOGPROBS = "message.output_text.logprobs"  # of `include`
MAX_DESCRIPTION_CHARS = 16 * 1024  # of a format, which the response repeats
ONLY_FUNCTIONS = "must be 'function': the service runs no tools of its own"

Key = Annotated[str, Meta(max_length=64)]
Value = Annotated[str, Meta(max_length=512)]


class TextFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Name = "text"
    name: Name | None = None  # for the model's eyes, as is the next one
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    schema: Any = None
    strict: bool | None = None  # a schema holds either way

    def grammar(self) -> tuple[Grammar, str] | None:
        """With the name of its field. Raises InvalidRequestError."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json_object"), "text.format"
            case "json_schema":
                return schema_grammar("text.format.schema", self.schema), "text.format.schema"
        known = "text, json_object, json_schema"
        raise InvalidRequestError("text.format.type", f"is {shown(self.type)}, must be one of {known}")


class TextConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Name | None = None  # goes to the chat template


class Reasoning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Name | None = None
    summary: Name | None = None  # without effect, as are those that follow: reasoning is told in full
    generate_summary: Name | None = None
    context: Name | None = None
    mode: Name | None = None


class ResponsesBody(ExtendedBody, frozen=True, kw_only=True):
    """POST /v1/responses"""

    inner: ClassVar[Mapping[str, type[Struct]]] = {
        "input": Item,
        "content": Part,
        "output": Part,
        "summary": Part,
        "text": TextConfig,
        "format": TextFormat,
        "reasoning": Reasoning,
        "prompt_cache_options": CacheOptions,
    }
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
    }
    without_effect: ClassVar[Sequence[str]] = (
        *("user", "safety_identifier", "service_tier", "stream_options", "max_tool_calls"),
        *("access_programs", "image"),
    )

    input: str | Sequence[Item] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    tools: Raw = ABSENT
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    include: Sequence[Name] | None = None
    top_logprobs: int | None = None
    truncation: Name | None = None
    metadata: Annotated[dict[Key, Value], Meta(max_length=16)] | None = None
    prompt_cache_retention: Name | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_key: Name | None = None
    stop: str | list[str] | None = None  # as in the chat API
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    user: Raw = ABSENT
    safety_identifier: Raw = ABSENT
    service_tier: Raw = ABSENT
    stream_options: Raw = ABSENT
    max_tool_calls: Raw = ABSENT
    access_programs: Raw = ABSENT
    image: Raw = ABSENT

    def keep_s(self) -> float:
        """Raises InvalidRequestError."""
        retention = retention_s("prompt_cache_retention", self.prompt_cache_retention, RETENTIONS_S)
        session = session_keep_s(self.prompt_cache_key)
        return max(session, retention, 0.0 if self.prompt_cache_options is None else self.prompt_cache_options.keep_s())

    def options(self) -> Options:
        """Raises InvalidRequestError."""
        given, names = self.sampled(), {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
        if self.truncation not in (None, "disabled"):
            raise InvalidRequestError("truncation", f"is {shown(self.truncation)}, must be 'disabled'")
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if LOGPROBS in (self.include or ()):
            given["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequestError("top_logprobs", f"needs {LOGPROBS!r} in include")
        if found := ((self.text or TextConfig()).format or TextFormat()).grammar():
            given["grammar"], names["grammar"] = found
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return Options(given=given, names=names, stop=stop)

    def turns(self) -> Conversation:
        """The messages of the input, without the instructions. Raises InvalidRequestError."""
        conversation = Conversation()
        if self.input is None:
            raise InvalidRequestError("input", "is missing")
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for i, item in enumerate(items):
            conversation.add(f"input[{i}]", item)
        conversation.end()
        return conversation

    def template_variables(self) -> dict[str, Any]:
        """Raises InvalidRequestError."""
        verbosity = None if self.text is None else self.text.verbosity
        effort = None if self.reasoning is None else self.reasoning.effort
        return self.variables({**verbosity_variables(verbosity), **thinking_variables(effort)})

    def told_choice(self) -> Any:
        """What a response repeats of the choice, which is checked: what is known of it."""
        match self.tool_choice:
            case {"type": "function", "name": name}:
                return {"type": "function", "name": name}
            case {"type": "allowed_tools", "mode": mode, "tools": tools}:
                names = [tool.get("function", tool)["name"] for tool in tools]
                told = [{"type": "function", "name": name} for name in names]
                return {"type": "allowed_tools", "mode": mode, "tools": told}
        return self.tool_choice or "auto"

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequestError."""
        tools, names, strict = [], [], []
        for i, tool in enumerate(read_tools(self.tools)):
            if tool.get("type") != "function":
                raise InvalidRequestError(f"tools[{i}].type", f"is {shown(tool.get('type'))}, {ONLY_FUNCTIONS}")
            names.append(check_function(f"tools[{i}]", tool))
            tools.append(plain_tool(names[-1], tool.get("description"), tool.get("parameters")))
            strict += names[-1:] if tool.get("strict") is True else []
        check_distinct("tools[{}].name", names)
        kind, named, allowed = _choice(self.tool_choice, names)
        return ToolUse(
            tools,
            kind,
            named,
            self.parallel_tool_calls is not False,
            allowed,
            strict,
            schema_field="tools[{}].parameters",
        )


def _choice(choice: Any, names: Sequence[str]) -> tuple[ToolChoice, str | None, Sequence[str] | None]:
    """(kind, name of the tool that must be called, names of those that may be). Raises InvalidRequestError."""
    if choice in (None, "none", "auto", "required"):
        check_some("tool_choice", choice, names)
        return choice or "auto", None, None
    match choice:
        case {"type": "function"}:
            return "required", check_named("tool_choice.name", choice.get("name"), names), None
        case {"type": "allowed_tools"}:
            kind, allowed = allowed_tools("tool_choice", choice, names)
            return kind, None, allowed
    form = "'none', 'auto', 'required', {'type': 'function', 'name': ...} or of type 'allowed_tools'"
    raise InvalidRequestError("tool_choice", f"must be {form}")


class OpenPart(Part, frozen=True, kw_only=True, forbid_unknown_fields=False): ...


class OpenItem(Item, frozen=True, kw_only=True, forbid_unknown_fields=False):
    content: str | Sequence[OpenPart] | None = None
    output: str | Sequence[OpenPart] | None = None
    summary: Sequence[OpenPart] | None = None


class OpenTextConfig(TextConfig, frozen=True, kw_only=True, forbid_unknown_fields=False): ...


class OpenReasoning(Reasoning, frozen=True, kw_only=True, forbid_unknown_fields=False): ...


class OpenResponsesBody(ResponsesBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    input: str | Sequence[OpenItem] | None = None
    text: OpenTextConfig | None = None
    reasoning: OpenReasoning | None = None
