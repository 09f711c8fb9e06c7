"""Why a value of serving.yaml is refused, in words: what it is, and what may stand there."""

import json
import re
from types import NoneType
from typing import Any

from msgspec import Struct, inspect

NUMBERS = {inspect.IntType: "a whole number", inspect.FloatType: "a number"}
BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}


def refusal(data: Any, schema: type[Struct], path: str, problem: str) -> str:
    """`path`: `engine.block_size`, of the value in `data` that msgspec refuses because of `problem`."""
    kind: inspect.Type = inspect.type_info(schema)
    for name in re.findall(r"[^.[\]]+", path):
        while isinstance(kind, inspect.Metadata):
            kind = kind.type
        if isinstance(kind, inspect.VarTupleType) and name.isdecimal():  # an item of a list
            kind, data = kind.item_type, data[int(name)]
            continue
        if isinstance(kind, inspect.UnionType) and isinstance(data, dict):
            kind = next((one for one in kind.types if isinstance(one, inspect.StructType)), kind)
        if not isinstance(kind, inspect.StructType):
            return problem
        field = next((field for field in kind.fields if field.name == name), None)
        if field is None:
            return problem
        kind, data = field.type, data[name]
    if isinstance(kind, inspect.StructType | inspect.DictType) and isinstance(data, dict):
        return problem  # values that do not go together, or a name or a value in it
    return f"{_shown(data)} is not {_wanted(kind)}"


def _wanted(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return str((kind.extra_json_schema or {}).get("description")) or _wanted(kind.type)
        case inspect.IntType() | inspect.FloatType():
            bounds = [
                f"{word} {limit:.12g}" for key, word in BOUNDS.items() if (limit := getattr(kind, key)) is not None
            ]
            return f"{NUMBERS[type(kind)]} {' and '.join(bounds)}".strip()
        case inspect.LiteralType():
            return f"one of {', '.join(map(str, kind.values))}"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.UnionType():
            return " or ".join(map(_wanted, kind.types))
        case inspect.VarTupleType():
            return "a list"
        case inspect.DictType():
            return "a section"
        case inspect.StructType():
            return f"a section with keys such as {kind.fields[0].name}"
    return "text"


def _shown(value: Any) -> str:
    """Returns the value without a login, and only the beginning of a long text."""
    if isinstance(value, (dict, list)) or not isinstance(value, (str, int, float, NoneType)):
        return f"a {'section' if isinstance(value, dict) else type(value).__name__}"
    text = re.sub("//[^/]*@", "//...@", json.dumps(value, ensure_ascii=False))
    return text if len(text) < 80 else f"{text[:77]}..."
