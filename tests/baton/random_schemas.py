"""Random JSON schemas that can be followed, values that match them, and schemas with one keyword that cannot be."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

Schema = dict[str, Any]

PATTERNS = {  # a pattern, and texts that match it
    "^[a-c]{2,5}-[0-9]+$": ("ab-1", "ccccc-2024"),
    "^(red|green)( (red|green))*$": ("red", "green red red"),
    '^[^0-9"]{1,8}$': ("x y", "Übung"),
}
FORMATS = {  # a format, and texts that have it
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("23:59:59Z", "08:00:00.5+01:30"),
    "date-time": ("2024-02-29T12:30:00Z", "1999-12-31T23:59:59.25-05:00"),
    "duration": ("P1DT2H", "P3W"),
    "email": ("ann@example.org",),
    "hostname": ("example.org", "a-1"),
    "ipv4": ("127.0.0.1", "255.255.255.0"),
    "ipv6": ("::1", "2001:db8:0:0:0:0:0:1"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "uri": ("https://example.org/a?b=c#d",),
}
NEVER_FOLLOWED: Schema = {  # keywords that no grammar follows, each with a value that a schema may give it
    "contains": {"type": "integer"},
    "dependentRequired": {"n": ["name"]},
    "if": {"type": "integer"},
    "not": {"type": "null"},
    "propertyNames": {"maxLength": 3},
    "unevaluatedProperties": False,
    "uniqueItems": True,
}
NAMES = ("name", "n", "größe", "list", "x y")
SCALARS = ("string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "multiple", "types")
NESTED = ("object", "array", "anyOf", "map", "tuple", "both", "both objects", "reference")
MAX_DEPTH = 3
DEFINITIONS = ("leaf", "tree", "linked/list", "größe there", "and back")


def random_schema(source: random.Random) -> Schema:
    """The definitions come first or last, as their writers have it; most of them refer to themselves."""
    schema = _schema(source)
    if schema.get("additionalProperties") is False and source.random() < 0.2:
        schema["properties"]["again"] = {"$ref": "#"}
    definitions: dict[str, Schema] = {}
    while used := [name for name in DEFINITIONS if name not in definitions and _refers([schema, definitions], name)]:
        definitions |= {name: _definition(source, name) for name in used}
    if not definitions:
        return schema
    return source.choice([{"$defs": definitions, **schema}, {**schema, "$defs": definitions}])


def never_followed(source: random.Random) -> tuple[Schema, str]:
    """A random schema with one more keyword somewhere, and the path of the keyword."""
    schema = copy.deepcopy(random_schema(source))
    path, part = source.choice(list(_parts("$", schema)))
    keyword = source.choice(list(NEVER_FOLLOWED))
    part[keyword] = NEVER_FOLLOWED[keyword]
    return schema, f"{path}.{keyword}"


def _parts(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for keyword, value in schema.items():
        match keyword, value:
            case "properties" | "$defs", named:
                inner = [(f".{name}", part) for name, part in named.items()]
            case "anyOf" | "allOf" | "prefixItems", parts:
                inner = [(f"[{i}]", part) for i, part in enumerate(parts)]
            case "items" | "additionalProperties", {}:
                inner = [("", value)]
            case _:
                inner = []
        for name, part in inner:
            yield from _parts(f"{path}.{keyword}{name}", part)


def _schema(source: random.Random, depth: int = 0) -> Schema:
    kind = source.choice(SCALARS + NESTED * (2 if depth < MAX_DEPTH else 0))
    return _nested(source, kind, depth + 1) if kind in NESTED else _scalar(source, kind)


def _scalar(source: random.Random, kind: str) -> Schema:
    match kind:
        case "string":
            low = source.randint(0, 4)
            bounds = {"minLength": low, "maxLength": low + source.randint(0, 6)}
            return {"type": "string", **_some(source, bounds, always="maxLength")}
        case "integer" | "number":
            return {"type": kind, **_bounds(source)}
        case "enum":
            return {"enum": source.sample(["red", "Übung", 1, 2.5, None, True, "a b", {"a": [1]}], 3)}
        case "const":
            return {"const": source.choice(["x", 7, False, {"n": None}, ["ü", 0.5]])}
        case "pattern":
            return {"type": "string", "pattern": source.choice(list(PATTERNS))}
        case "format":
            return {"type": "string", "format": source.choice(list(FORMATS))}
        case "multiple":
            return {"type": "integer", "multipleOf": source.randint(2, 7), "minimum": 0, "maximum": 100}
        case "types":
            return {"type": source.sample(["boolean", "null", "integer"], 2)} | _bounds(source)
        case kind:
            return {"type": kind}


def _nested(source: random.Random, kind: str, depth: int) -> Schema:
    match kind:
        case "map":
            return {"type": "object", "additionalProperties": _schema(source, depth)} | _some(
                source, {"minProperties": 1, "maxProperties": 3}
            )
        case "tuple":
            items = [_schema(source, depth) for _ in range(source.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": source.randint(0, len(items))}
        case "array":
            return {"type": "array", "items": _schema(source, depth), "minItems": source.randint(0, 2), "maxItems": 3}
        case "anyOf":
            choices = [_schema(source, depth), source.choice([{"type": "null"}, _schema(source, depth)])]
            return {"anyOf": source.sample(choices, 2)}
        case "both":
            low = source.randint(-50, 50)
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + source.randint(0, 200)}]}
        case "both objects":
            names = source.sample(NAMES, 4)
            return {"allOf": [_object(source, part, depth) for part in (names[:2], names[2:])]}
        case "reference":
            return {"$ref": _pointer(source.choice(DEFINITIONS))}
    closed = source.choice([{"additionalProperties": False}, {"additionalProperties": {"type": "null"}}])
    return _object(source, source.sample(NAMES, source.randint(1, 4)), depth) | closed


def _object(source: random.Random, names: list[str], depth: int) -> Schema:
    properties = {name: _schema(source, depth) for name in names}
    return {"type": "object", "properties": properties, "required": source.sample(names, source.randint(0, len(names)))}


def _definition(source: random.Random, name: str) -> Schema:
    leaf = _scalar(source, source.choice(SCALARS))
    match name:
        case "tree":
            return {"type": "array", "items": {"anyOf": [leaf, {"$ref": _pointer("tree")}]}, "maxItems": 2}
        case "linked/list":
            rest = {"anyOf": [{"$ref": _pointer(name)}, {"type": "null"}]}
            return {"type": "object", "properties": {"value": leaf, "rest": rest}, "required": ["rest"]} | {
                "additionalProperties": False
            }
        case "größe there":
            return {"type": "array", "prefixItems": [leaf, {"$ref": _pointer("and back")}], "items": False}
        case "and back":
            return {"anyOf": [{"$ref": _pointer("größe there")}, {"$ref": _pointer("leaf")}]}
    return leaf


def _bounds(source: random.Random) -> Schema:
    low = source.randint(-50, 50)
    lower = {source.choice(["minimum", "exclusiveMinimum"]): low}
    upper = {source.choice(["maximum", "exclusiveMaximum"]): low + source.randint(2, 200)}
    return source.choice([lower | upper, lower | upper, lower | upper, lower, upper])


def _some(source: random.Random, bounds: Schema, always: str = "") -> Schema:
    return {name: value for name, value in bounds.items() if name == always or source.random() < 0.5}


def _pointer(name: str) -> str:
    """RFC 6901, as the fragment of a URI."""
    return "#/$defs/" + quote(name.replace("/", "~1"))


def _refers(schemas: Any, name: str) -> bool:
    return json.dumps(_pointer(name)) in json.dumps(schemas)


def instance_of(source: random.Random, schema: Schema, whole: Schema | None = None) -> Any:
    """A value that matches a schema of random_schema(), or a part of the `whole` one."""
    whole = schema if whole is None else whole
    match schema:
        case {"$ref": "#"}:
            return instance_of(source, whole)
        case {"$ref": pointer}:
            (named,) = (name for name in whole["$defs"] if _pointer(name) == pointer)
            return instance_of(source, whole["$defs"][named], whole)
        case {"enum": values}:
            return source.choice(values)
        case {"const": value}:
            return value
        case {"anyOf": choices}:
            return instance_of(source, source.choice(choices), whole)
        case {"allOf": [{"type": "object"}, _] as parts}:
            return {name: value for part in parts for name, value in instance_of(source, part, whole).items()}
        case {"allOf": [one, another]}:
            return instance_of(source, one | another, whole)
        case {"pattern": pattern}:
            return source.choice(PATTERNS[pattern])
        case {"format": form}:
            return source.choice(FORMATS[form])
        case {"multipleOf": step}:
            return step * source.randint(0, schema["maximum"] // step)
        case {"type": [one, *_]}:
            return instance_of(source, schema | {"type": one}, whole)
        case {"prefixItems": items}:
            least = schema.get("minItems", 0)
            return [instance_of(source, item, whole) for item in items[: source.randint(least, len(items))]]
        case {"type": "string"}:
            length = source.randint(schema.get("minLength", 0), schema["maxLength"])
            return "".join(source.choices('abcdef 123"\\\n', k=length))
        case {"type": "integer" | "number" as kind}:
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            high = schema.get("maximum", schema.get("exclusiveMaximum"))
            low, high = high - 9 if low is None else low, low + 9 if high is None else high
            inner = source.randint(low, high) if "minimum" in schema and "maximum" in schema else low + 1
            return inner if kind == "integer" or inner == high else inner + 0.5
        case {"type": "boolean"}:
            return source.random() < 0.5
        case {"type": "null"}:
            return None
        case {"type": "object"}:
            return _object_of(source, schema, whole)
        case {"type": "array"}:
            count = source.randint(schema.get("minItems", 0), schema["maxItems"])
            return [instance_of(source, schema["items"], whole) for _ in range(count)]
    raise AssertionError(schema)


def _object_of(source: random.Random, schema: Schema, whole: Schema) -> dict[str, Any]:
    needed = schema.get("required", ())
    named = {
        name: part for name, part in schema.get("properties", {}).items() if name in needed or source.random() < 0.5
    }
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        count = source.randint(schema.get("minProperties", 0), min(schema.get("maxProperties", 2), 2))
        named |= dict.fromkeys(source.sample("abc", count), others)
    return {name: instance_of(source, part, whole) for name, part in named.items()}
