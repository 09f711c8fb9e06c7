"""Measures the memory of a decoded prompt, which may be thirty times its JSON."""

from collections.abc import Mapping
from sys import getsizeof

from baton_proto.images import Image
from router.api.wishes.validation import Chat, Pair, Prompt

BYTES_PER_ID: int = 40  # an integer, and its place in a list


def held_bytes(*values: object) -> int:
    """Bytes of values as JSON gives them, with all that is inside. Shared parts count each time."""
    num_bytes, found = 0, list(values)
    while found:
        value = found.pop()
        num_bytes += getsizeof(value)
        if isinstance(value, Mapping):
            found += value
            found += value.values()
        elif isinstance(value, list | tuple):
            found += value
        elif isinstance(value, Image):
            found.append(value.url)
    return num_bytes


def prompt_bytes(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return getsizeof(prompt)
    if isinstance(prompt, Pair):
        return held_bytes(prompt.query, prompt.document)
    if not isinstance(prompt, Chat):
        return BYTES_PER_ID * len(prompt)
    tools = () if prompt.tools is None else prompt.tools.tools
    return held_bytes(prompt.messages, prompt.variables, tools)
