"""Grammars of texts that stand in an answer without quotes, from their JSON schemas."""

import json
import re
from collections.abc import Mapping
from typing import Any

from runtime.errors import InvalidRequestError
from runtime.grammar.bounds import MAX_WRITTEN_OUT

_ANY = "(.|\\n)*"
_DAY = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_URI_SIGN = "[a-zA-Z0-9._~:@!$&'()*+,;=-]"
_FORMATS = {  # texts of these forms are valid; a few unusual ones are left out
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:\/\/{_URI_SIGN}+(\/{_URI_SIGN}*)*(\?({_URI_SIGN}|[\/?])*)?",
}
_CANNOT_FOLLOW = frozenset(("allOf", "anyOf", "oneOf", "not", "if", "$ref"))
_PART = re.compile(r"\\.|\[\^?+\]?+(?:\\.|[^\]\\])*+\]?+|[^\\[()|^$]++|.", re.DOTALL)  # open brackets reach to the end


def text_terminals(schema: Mapping[str, Any], where: str) -> list[str]:
    """Lark's terminals, all of which the text matches; none: any text. Raises InvalidRequestError, which names the
    keyword that cannot be followed, of the schema that lies at `where`."""
    parts: list[str] = []
    for keyword, value in schema.items():
        problem = ""
        match keyword, value:
            case ("enum", list()) | ("const", str()):
                texts = [text for text in ([value] if keyword == "const" else value) if isinstance(text, str)]
                parts.append("(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")")
                problem = "" if texts else "allows no text"
            case "pattern", str():
                try:
                    parts.append(f"/{_searched(value)}/")
                except ValueError as error:
                    problem = str(error)
            case "format", str() if value in _FORMATS:
                parts.append(f"/{_FORMATS[value]}/")
            case "format", str():
                problem = f"is none of {', '.join(_FORMATS)}"
            case (("minLength" | "maxLength"), int()) if value > MAX_WRITTEN_OUT:
                problem = f"is more than {MAX_WRITTEN_OUT}"
            case (("minLength" | "maxLength"), int()):
                parts.append(f"/(.|\\n){{{f'{value},' if keyword == 'minLength' else f'0,{value}'}}}/")
            case _ if keyword in _CANNOT_FOLLOW:
                problem = "cannot be followed in a text without quotes"
        if problem:
            raise InvalidRequestError("tools", f"uses {keyword!r} at {where}.{keyword}: it {problem}; leave it out")
    return parts


def _searched(pattern: str) -> str:
    """The regular expression of the whole texts in which `pattern` is found. Raises ValueError."""
    return "(" + "|".join(f"({_whole(branch)})" for branch in _branches(pattern)) + ")"


def _branches(pattern: str) -> list[list[str]]:
    """The parts of each alternative that stands in no brackets."""
    branches: list[list[str]] = [[]]
    depth = 0
    for part in _PART.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(part)
    return branches


def _whole(parts: list[str]) -> str:
    before, after = _ANY, _ANY
    if parts and parts[0] == "^":
        before, parts = "", parts[1:]
    if parts and parts[-1] == "$":
        after, parts = "", parts[:-1]
    if "^" in parts or "$" in parts:
        raise ValueError("has ^ or $ within")
    return f"{before}({''.join(map(_in_lark, parts))}){after}"


def _in_lark(part: str) -> str:
    """The part as it stands between Lark's slashes."""
    return part.replace("\n", "\\n") if part.startswith("\\") else part.replace("/", "\\/").replace("\n", "\\n")
