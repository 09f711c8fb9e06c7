"""Who shows an API key, and what that key's line allows: `KEY [tenant=NAME] [max_priority=N] ...`."""

import hashlib
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from runtime.errors import ConfigError
from runtime.security.secret import MIN_LENGTH, Secret, parse_secrets, read_file

ANY_TENANT: Final = "*"
PerMinute = Annotated[int, Meta(gt=0, le=10**12)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class Caller(Struct, frozen=True, forbid_unknown_fields=True):
    """What a key's line says, each key once. None: no limit of its own."""

    tenant: Annotated[str, Meta(pattern="^[!-~]{1,128}$")] | None = None  # ANY_TENANT: each request may name its own
    max_priority: Priority | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None  # of prompts and answers
    key: str = ""  # its name in logs; no setting of a line


ANYONE = Caller("")
"""Who calls a service that asks for no key: all are one tenant."""


def read_callers(path: str, field: str) -> list[tuple[Secret, Caller]]:
    """The keys of a file, one per line, with their callers. Raises ConfigError that names `field` and shows nothing of
    the file."""
    return parse_callers(read_file(path, field), f"{field}: {path}", MIN_LENGTH)


def parse_callers(text: str, where: str, min_length: int = 1) -> list[tuple[Secret, Caller]]:
    """Raises ConfigError. A line that names no tenant gets one of its own."""
    lines = [line.split() for line in text.splitlines()]
    keys = parse_secrets("\n".join("".join(words[:1]) for words in lines), where, min_length)
    callers = [_caller(words[1:], where, f"line {number}") for number, words in enumerate(lines, 1) if words]
    return [
        (key, msgspec.structs.replace(caller, tenant=caller.tenant or key_name(key), key=key_name(key)))
        for key, caller in zip(keys, callers, strict=True)
    ]


def _caller(settings: list[str], where: str, line: str) -> Caller:
    known = [name for name in Caller.__struct_fields__ if name != "key"]
    given = [setting.partition("=") for setting in settings]
    values = {name: value for name, _, value in given}
    if len(values) < len(given) or not values.keys() <= {*known}:
        problem = f"{line} holds more than one word; behind the key stand NAME=VALUE, each once, of {', '.join(known)}"
        raise ConfigError(where, problem)
    try:
        return msgspec.convert(values, Caller, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(where, f"{line}: {error}") from error


def key_name(key: Secret) -> str:
    """The name by which logs tell keys apart; nobody finds a key by it."""
    return f"key-{hashlib.sha256(key.reveal().encode()).hexdigest()[:16]}"
