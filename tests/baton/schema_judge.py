"""Whether a text is what a JSON schema asks for: its formats count, and so does the order of its properties."""

import json
import re
from collections.abc import Iterator
from datetime import date
from typing import Any
from urllib.parse import urlsplit

import jsonschema

_BASE = jsonschema.Draft202012Validator
_PLAIN_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"  # RFC 3339
_DURATION = r"P(?!$)((\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?|\d+W)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


def _whole(pattern: str, text: Any) -> bool:
    return not isinstance(text, str) or re.fullmatch(pattern, text, re.ASCII | re.IGNORECASE) is not None


@_FORMATS.checks("time")
def _is_time(text: Any) -> bool:
    return _whole(_PLAIN_TIME, text)


@_FORMATS.checks("date-time", ValueError)
def _is_date_time(text: Any) -> bool:
    if not isinstance(text, str):
        return True
    day, clock = text[:10], text[11:]
    return bool(date.fromisoformat(day)) and text[10:11] in ("T", "t") and _is_time(clock)


@_FORMATS.checks("duration")
def _is_duration(text: Any) -> bool:
    return _whole(_DURATION, text)


@_FORMATS.checks("hostname")
def _is_hostname(text: Any) -> bool:
    return _whole(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", text)


@_FORMATS.checks("uri", ValueError)
def _is_uri(text: Any) -> bool:
    """RFC 3986: a scheme, and none but the characters that may stand unescaped."""
    if not isinstance(text, str):
        return True
    return bool(urlsplit(text).scheme) and _whole(r"([\w.~:/?#\[\]@!$&'()*+,;=-]|%[0-9a-f]{2})+", text)


def _in_order(validator: Any, properties: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    yield from _BASE.VALIDATORS["properties"](validator, properties, instance, schema) or ()
    if isinstance(instance, dict):
        named = [name for name in instance if name in properties]
        if named != [name for name in properties if name in instance]:
            yield jsonschema.ValidationError(f"{named} are not in the order of {[*properties]}")


_JUDGE = jsonschema.validators.extend(_BASE, {"properties": _in_order})


def mismatch(schema: Any, text: str) -> str:
    """Why a text is wrong; empty when it is right."""
    try:
        error = jsonschema.exceptions.best_match(_JUDGE(schema, format_checker=_FORMATS).iter_errors(json.loads(text)))
    except ValueError as problem:
        error = problem
    return f"{json.dumps(schema, ensure_ascii=False)} gives {text!r}: {error!s:.200}" if error else ""
