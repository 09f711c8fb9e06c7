"""Every key of serving.yaml refuses what it cannot mean, and says what may stand there."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from runtime.config.serving import ServingConfig, parse_config
from runtime.errors import ConfigError

WRONG: dict[type[inspect.Type], tuple[Any, ...]] = {
    inspect.IntType: (-1, 10**30, 1.5, "8", True, [1]),
    inspect.FloatType: (-1.0, math.inf, math.nan, 1e300, "1 s", True, {}),
    inspect.StrType: ("", "a\nb", "a\x00b", 5, ["a"]),
    inspect.BoolType: ("yes", 1, [True]),
    inspect.VarTupleType: ("*", 5, {}),
    inspect.DictType: (5, "a", [1]),
    inspect.LiteralType: ("nonsense", 17, [16]),
}


def leaves(kind: inspect.Type, path: str = "") -> Iterator[tuple[str, inspect.Type, bool]]:
    """Every key with its type, and whether null may stand there."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from leaves(field.type, f"{path}.{field.name}" if path else field.name)
    elif isinstance(kind, inspect.UnionType):
        inner = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
        nullable = len(inner) < len(kind.types)
        inner = [one for one in inner if len(inner) == 1 or not isinstance(one, inspect.DictType)]
        for one in inner:
            yield from ((at, found, nullable or may_be_null) for at, found, may_be_null in leaves(one, path))
    else:
        yield path, kind, False


LEAVES = list(leaves(inspect.type_info(ServingConfig)))


def nested(path: str, value: Any) -> Any:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("path", "kind", "nullable"), LEAVES, ids=[path for path, *_ in LEAVES])
def test_a_key_refuses_values_that_it_cannot_mean(path: str, kind: inspect.Type, nullable: bool) -> None:
    for value in (*WRONG[type(kind)], *(() if nullable else (None,))):
        with pytest.raises(ConfigError) as caught:
            parse_config(nested(path, value))
        assert caught.value.where == f"configuration: {path}", value
        assert " is not " in caught.value.problem
        assert not any(word in caught.value.problem for word in ("`", "regex", "Expected"))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("engine.block_size", 17, "17 is not auto, 16, 32, 64 or 128"),
        ("engine.max_running", "many", '"many" is not auto, or a whole number of at least 1'),
        ("engine.gpu_memory_share", 1.0, "1.0 is not a number above 0 and below 1"),
        ("engine.kv_memory", "10 gigs", '"10 gigs" is not auto, or a size in B, KB, MB, GB, KiB, MiB or GiB'),
        ("router.http_port", 70000, "70000 is not a whole number of at least 0 and at most 65535"),
        ("engine.prefill_tensor_parallel", 3, "3 is not one of 1, 2, 4, 8 or null"),
        ("planner.policy", "guess", '"guess" is not one of slo, threshold'),
        ("planner.enabled", "yes", '"yes" is not true or false'),
        ("planner.targets.attainment", 1, "1 is not a number above 0 and below 1"),
        ("namespace", "Has Spaces", "lower-case letters"),
        (
            "workers.decode",
            "many",
            '"many" is not a whole number of at least 0 and at most 1024 or a section',
        ),
        ("router", None, "null is not a section with keys such as host"),
        ("nats.url", "nats://me:secret@h\n", "nats://...@h"),
        ("nats.url", "http://x", '"http://x" is not nats://HOST:PORT or tls://HOST:PORT'),
        ("model", "m" * 5000, "mmm..."),
    ],
)
def test_the_message_says_the_value_and_what_may_stand_there(path: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(nested(path, value))
    assert words in caught.value.problem
    assert len(caught.value.problem) < 200
    assert "secret" not in caught.value.problem


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("router", {"http_port": 8001}, "http_port and grpc_port are both 8001"),
        ("planner.limits", {"max_prefill": 0}, "min_prefill is 1, above max_prefill, which is 0"),
        ("planner.limits", {"min_decode": 65}, "min_decode is 65, above max_decode, which is 64"),
        ("planner.limits", {"gpu_budget": 1}, "min_prefill + min_decode is 2, above gpu_budget, which is 1"),
    ],
)
def test_values_that_do_not_go_together_are_refused(section: str, values: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(nested(section, values))
    assert caught.value.where == f"configuration: {section}"
    assert words in caught.value.problem


def test_free_ports_may_be_asked_for_twice() -> None:
    assert parse_config({"router": {"http_port": 0, "grpc_port": 0}}).router.grpc_port == 0
