"""Tells a model of tools as text of the messages, if its chat template knows no tools.

The tools stand at the end of the system message, or before the first message of a user where the template takes no
system message. Calls and their results are text of their turns, unless the template writes calls.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.chat_template import Ending, Message
from router.text.segment_cache import Unfinished
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

_TOLD = """# Tools

You may call these functions. Each is described by a line of JSON, with the JSON schema of its parameters:
{tools}

To call a function, answer with nothing but its name and its arguments, a JSON object, in this form:
{form}
The next message has its result. If no function is needed, answer in plain text."""


def begin_plain_chat(
    tokenizer: Tokenizer,
    form: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    max_chars: int,
    ending: Ending,
) -> Unfinished:
    """Does what Tokenizer.begin_chat does, with the tools as text. `form`: a call of NAME with ARGUMENTS. Raises
    InvalidRequestError."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    told = _TOLD.format(tools=functions, form=form)
    turns = list(messages) if "tool_calls" in tokenizer.chat_template else _with_calls_as_text(form, messages)
    has_system = bool(turns) and turns[0]["role"] == "system"
    system = {"role": "system", "content": f"{turns[0]['content']}\n\n{told}" if has_system else told}
    try:
        return tokenizer.begin_chat([system, *turns[has_system:]], variables, max_chars, ending)
    except InvalidRequestError:
        first = next((place for place, turn in enumerate(turns) if turn["role"] == "user"), None)
        if has_system or first is None:
            raise
        turns[first] = {**turns[first], "content": f"{told}\n\n{turns[first]['content']}"}
        return tokenizer.begin_chat(turns, variables, max_chars, ending)


def _with_calls_as_text(form: str, messages: Sequence[Message]) -> list[Message]:
    """The results of one turn's calls are one turn."""
    before, rest = form.split("NAME")
    between, after = rest.split("ARGUMENTS")
    turns: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if turns and "result" in turns[-1]:
                result = f"{turns.pop()['content']}\n{result}"
            turns.append({"role": "user", "content": result, "result": True})
        elif message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            arguments = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
            calls = [f"{before}{f['name']}{between}{a}{after}" for f, a in zip(functions, arguments, strict=True)]
            turns.append({"role": "assistant", "content": "\n".join(filter(None, (message["content"], *calls)))})
        else:
            turns.append(message)
    return turns
