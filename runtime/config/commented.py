"""serving.yaml as it stands in the repository: every key with its default, below the comment of its field.

The comments are those in the sources of the Structs; their layout is the file's.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml
from msgspec import Struct

from runtime.config.serving import AUTO_KEYS, ServingConfig

HEAD = """\
# Every setting of a Baton service, with its default: what `baton config` prints. `baton up --config serving.yaml` reads
# it; leave out what you do not change. An unknown key is refused, and the nearest known one is named.
"""
FIELD = re.compile(r"    (\w+): ")


def commented() -> str:
    return "\n".join([HEAD, *_section(ServingConfig(), ""), ""])


def _section(section: Struct, indent: str) -> Iterator[str]:
    """Its lines. A comment belongs to the field below it, and so does an empty line."""
    above: list[str] = []
    begun = False
    for line in inspect.getsource(type(section)).splitlines():
        field = FIELD.match(line)
        if line.startswith("    #"):
            above.append(indent + line.strip())
        elif field and field[1] in section.__struct_fields__:
            yield from above
            yield from _key(field[1], getattr(section, field[1]), indent)
            above, begun = [], True
        else:
            above = [""] if begun and not line.strip() else []


def _key(name: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Struct):
        yield f"{indent}{name}:"
        yield from _section(value, indent + "  ")
    else:
        plain = "auto" if name in AUTO_KEYS else msgspec.to_builtins(value)
        yield f"{indent}{name}: {yaml.safe_dump(plain, default_flow_style=True).splitlines()[0]}"
