"""Random JSON schemas, and values that match them."""

import random
from typing import Any

PATTERNS = {  # a pattern, and texts that match it
    "^[a-c]{2,5}-[0-9]+$": ("ab-1", "ccccc-2024"),
    "^(red|green)( (red|green))*$": ("red", "green red red"),
    '^[^0-9"]{1,8}$': ("x y", "Übung"),
}


def random_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["pattern", "multiple", "types"]
    match source.choice(kinds + ["object", "array", "anyOf", "map", "tuple"] * (3 if depth < 3 else 0)):
        case "string":
            low = source.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + source.randint(0, 6)}
        case "integer":
            low = source.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 200)}
        case "number":
            return {"type": "number", "minimum": -10, "exclusiveMaximum": source.randint(1, 9)}
        case "enum":
            return {"enum": source.sample(["red", "Übung", 1, 2.5, None, True, "a b"], 3)}
        case "const":
            return {"const": source.choice(["x", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": source.choice(list(PATTERNS))}
        case "multiple":
            return {"type": "integer", "multipleOf": source.randint(2, 7), "minimum": 0, "maximum": 100}
        case "types":
            return {"type": source.sample(["boolean", "null", "integer"], 2)}
        case "map":
            return {"type": "object", "additionalProperties": random_schema(source, depth + 1)}
        case "tuple":
            items = [random_schema(source, depth + 1) for _ in range(source.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": source.randint(0, len(items))}
        case "object":
            names = source.sample(["name", "n", "größe", "list", "x y"], source.randint(1, 4))
            properties = {name: random_schema(source, depth + 1) for name in names}
            needed = source.sample(names, source.randint(0, len(names)))
            return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}
        case "array":
            items = random_schema(source, depth + 1)
            return {"type": "array", "items": items, "minItems": source.randint(0, 2), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(source, depth + 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def instance_of(source: random.Random, schema: dict[str, Any]) -> Any:
    """A value that matches a schema of random_schema()."""
    match schema:
        case {"enum": values}:
            return source.choice(values)
        case {"const": value}:
            return value
        case {"anyOf": choices}:
            return instance_of(source, source.choice(choices))
        case {"pattern": pattern}:
            return source.choice(PATTERNS[pattern])
        case {"multipleOf": step}:
            return step * source.randint(0, schema["maximum"] // step)
        case {"type": [one, *_]}:
            return instance_of(source, {"type": one, "minimum": -5, "maximum": 5})
        case {"prefixItems": items}:
            return [instance_of(source, item) for item in items[: source.randint(schema["minItems"], len(items))]]
        case {"type": "object", "additionalProperties": {} as values}:
            return {name: instance_of(source, values) for name in source.sample("abc", source.randint(0, 2))}
        case {"type": "string"}:
            length = source.randint(schema["minLength"], schema["maxLength"])
            return "".join(source.choices('abcdef 123"\\\n', k=length))
        case {"type": "integer"}:
            return source.randint(schema["minimum"], schema["maximum"])
        case {"type": "number"}:
            return schema["minimum"] + source.randint(0, 7) * 0.5
        case {"type": "boolean"}:
            return source.random() < 0.5
        case {"type": "null"}:
            return None
        case {"type": "object"}:
            kept = (name for name in schema["properties"] if name in schema["required"] or source.random() < 0.5)
            return {name: instance_of(source, schema["properties"][name]) for name in kept}
        case {"type": "array"}:
            count = source.randint(schema["minItems"], schema["maxItems"])
            return [instance_of(source, schema["items"]) for _ in range(count)]
    raise AssertionError(schema)
