"""A model's chat template: messages in, the prompt's text out.

Templates are written for transformers, so the environment offers what transformers offers them: the same whitespace
rules, the same filters and functions, loop controls, and `generation` blocks, which matter in training only.
"""

import datetime
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from runtime.checkpoint.model_config import read_object
from runtime.errors import ContextLengthError, InvalidRequestError, ModelError
from runtime.side_lane import stop_if_unwanted

Message = Mapping[str, Any]
"""`role` and `content`, both text, and whatever else the template reads. With `images` there is a SLOT in the content
for each of them."""

Ending = Literal["answer", "continue", "none"]
"""How the text ends: the assistant's turn is opened, or the final message is left open for the assistant to continue,
or neither."""

DEFAULT_TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
PIECES_AT_ONCE = 256  # of the text, after which its length and the time are looked at
NESTED = "they, or variables of their template, are nested too deep"
MARK = "\U0001fffe\U0001ffff"  # noncharacters, behind what the final message says where it is to be continued
SLOT = "\U0001fffe\U0001fffd"  # noncharacters, where an image stands in what a message says
MAX_RENDER_S = 5.0  # of a processor, for one conversation; a large one takes milliseconds


class ChatTemplate:
    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], model: str = "", tool_source: str | None = None
    ) -> None:
        """`special_tokens`: text by name, such as `bos_token`, for the template. `tool_source`: another template, for
        chats with tools. Without a source `render` refuses everything. Raises ModelError when the source is not a
        template."""
        self._special_tokens = dict(special_tokens)
        self.source = "".join(filter(None, (source, tool_source)))
        try:
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(self.source)))
            self._template = None if source is None else _environment().from_string(source)
            self._tool_template = None if tool_source is None else _environment().from_string(tool_source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:  # nested too deep
            raise ModelError(model, f"its chat template cannot be used: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
        max_chars: int | None = None,
    ) -> str:
        """`variables` come from the caller and cannot replace what is set here. Raises InvalidRequestError when there
        is no template, when it refuses the messages, and when the text gets longer than `max_chars`."""
        if ending == "continue":
            return _left_open(self.render(_marked(messages), variables, "none", max_chars))
        values: dict[str, Any] = {"tools": None, "documents": None, **(variables or {}), **self._special_tokens}
        values |= {"messages": in_parts(messages), "add_generation_prompt": ending == "answer"}
        template = (self._tool_template if values["tools"] else None) or self._template
        if template is None:
            raise InvalidRequestError("messages", "the model has no chat template; send a prompt instead")
        try:
            return _rendered(template, values, max_chars)
        except _RefusedError as refusal:
            written = [_with_written_arguments(message) for message in messages]
            if written == values["messages"]:
                raise
            try:
                return _rendered(template, values | {"messages": written}, max_chars)
            except _RefusedError:
                raise refusal from None


class _RefusedError(InvalidRequestError):
    """The template cannot render the messages as they are."""


def _rendered(template: jinja2.Template, values: Mapping[str, Any], max_chars: int | None) -> str:
    """Raises InvalidRequestError."""
    try:
        return _joined(template.generate(values), max_chars)
    except RecursionError as error:
        raise InvalidRequestError("messages", NESTED) from error
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _RefusedError("messages", f"the model's chat template refuses them: {error}") from error


def _marked(messages: Sequence[Message]) -> list[Message]:
    return [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + MARK + " "}] if messages else []


def _left_open(text: str) -> str:
    """The text up to the end of the final message. A template that strips its messages strips this one, too. Raises
    InvalidRequestError."""
    said, mark, after = text.rpartition(MARK)
    if not mark:
        problem = "cannot be continued: the model's chat template does not end with what the final message says"
        raise InvalidRequestError("messages", problem)
    return said if after.startswith(" ") else said.rstrip()


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Where there are images all contents are parts, because there are templates that read nothing else then."""
    if not any(message.get("images") for message in messages):
        return list(messages)
    return [_in_parts(message) for message in messages]


def _in_parts(message: Message) -> Message:
    texts = message["content"].split(SLOT) if message.get("images") else [message["content"]]
    parts: list[Mapping[str, str]] = []
    for i, text in enumerate(texts):
        parts += [{"type": "image"}] * (i > 0) + [{"type": "text", "text": text}] * bool(text)
    rest = {name: value for name, value in message.items() if name != "images"}
    return {**rest, "content": parts}


def _with_written_arguments(message: Message) -> Message:
    """The arguments of calls as JSON text, which templates such as DeepSeek-R1's join with other text. Most read an
    object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        written = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": written}})
    return {**message, "tool_calls": calls}


def _joined(pieces: Iterator[str], max_chars: int | None) -> str:
    """Raises InvalidRequestError as soon as the text is too long, or takes too long."""
    began_s, num_chars, parts = time.thread_time(), 0, list[str]()
    while some := list(islice(pieces, PIECES_AT_ONCE)):
        parts += some
        num_chars += sum(map(len, some))
        stop_if_unwanted()
        if max_chars is not None and num_chars > max_chars:
            raise ContextLengthError("messages", f"give a text of more than {max_chars} characters")
        if time.thread_time() - began_s > MAX_RENDER_S:
            raise InvalidRequestError("messages", f"take the model's chat template more than {MAX_RENDER_S} s")
    return "".join(parts)


def load_chat_template(folder: Path) -> ChatTemplate:
    """Loads the template of a folder in Hugging Face form: chat_template.jinja and `TOOL_TEMPLATE`, or the one template
    or the named ones of tokenizer_config.json. Raises ModelError."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_object(folder / name) if (folder / name).is_file() else {}
    source, tool_source = _named(settings.get("chat_template"))
    source, tool_source = _read(folder, DEFAULT_TEMPLATE) or source, _read(folder, TOOL_TEMPLATE) or tool_source
    special_tokens = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    known = {name: text for name, text in special_tokens.items() if text is not None}
    return ChatTemplate(source, known, str(folder), tool_source)


def _read(folder: Path, name: str) -> str | None:
    try:
        return (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(str(folder), f"{name} cannot be read: {error}") from error


def _named(setting: Any) -> tuple[str | None, str | None]:
    """(the default, the one for tools) of a setting, which is one template or a list of named ones."""
    if not isinstance(setting, list):
        return (setting if isinstance(setting, str) else None), None
    named = {entry.get("name"): entry.get("template") for entry in setting if isinstance(entry, dict)}
    default, for_tools = (
        source if isinstance(source, str) else None for source in map(named.get, ("default", "tool_use"))
    )
    return default, for_tools


def _content(token: Any) -> str | None:
    """A special token is written as its text or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's words, which are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
