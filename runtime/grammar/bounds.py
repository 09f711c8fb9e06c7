"""How large a grammar may be and how deep a JSON schema may go, before any native code reads it."""

from typing import Any, Final

from baton_proto.grammar import MAX_ALTERNATIVES, MAX_GRAMMAR_CHARS, Grammar

MAX_DEPTH: Final = 1000
DEFINITIONS: Final = ("$defs", "definitions")


def check_size(grammar: Grammar) -> None:
    """Raises ValueError. Invariant: what passes can be sent, because the next process decodes no more."""
    if grammar.num_chars > MAX_GRAMMAR_CHARS:
        raise ValueError(f"has {grammar.num_chars} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    if len(grammar.choices) > MAX_ALTERNATIVES:
        raise ValueError(f"has {len(grammar.choices)} texts; at most {MAX_ALTERNATIVES} are allowed")
    if not all(_is_whole(text) for text in (grammar.text, *grammar.choices)):
        raise ValueError("has half of a character (a lone surrogate); write the whole one")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_depth(schema: Any) -> None:
    """Raises ValueError. Counts objects, lists and references from the root on; a definition counts where it is
    referred to first, as it is compiled."""
    seen: set[str] = set()
    ahead = [(schema, 1)]
    while ahead:
        value, depth = ahead.pop()
        if depth > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} deep, references included; give it fewer levels"
            raise ValueError(problem)
        parts = list(value)
        if isinstance(value, dict):
            parts = [part for name, part in value.items() if name not in DEFINITIONS]
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
                seen.add(reference)
                parts.append(_found(schema, reference))
        ahead += [(part, depth + 1) for part in reversed(parts) if isinstance(part, dict | list)]


def _found(schema: Any, reference: str) -> Any:
    """What a JSON pointer leads to; None: nothing."""
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema
