"""What a change of a key takes: new processes of those that read it, of all where no row says, or nothing."""

from typing import Any

import msgspec
import pytest

from baton.service.wanted.effects import ALL, EFFECTS, Kind, changes, changes_for, effect_of
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig

KINDS: tuple[Kind, ...] = ("router", "prefill", "decode")


def keys_of(data: dict[str, Any], prefix: str = "") -> set[str]:
    """Every section and key of serving.yaml."""
    inner = (keys_of(value, f"{prefix}{key}.") for key, value in data.items() if isinstance(value, dict))
    return {prefix + key for key in data}.union(*inner)


def test_each_row_is_of_a_key_or_section_that_there_is() -> None:
    assert EFFECTS.keys() <= keys_of(msgspec.to_builtins(ServingConfig()))


def test_a_key_that_no_row_names_takes_all_processes() -> None:
    assert effect_of("step_times.decode_floor_ms") == effect_of("a.key.to.come") == ALL


@pytest.mark.parametrize(
    ("key", "value", "replaced"),
    [
        ("router.queue_limit", 5, ["router"]),
        ("engine.max_running", 5, ["prefill", "decode"]),
        ("engine.prefill_tensor_parallel", 2, ["prefill"]),
        ("step_times.decode_floor_ms", 7.0, [*KINDS]),
        ("workers.decode", 5, []),
        ("logging.level", "debug", []),
    ],
)
def test_processes_are_replaced_that_read_the_key(key: str, value: object, replaced: list[Kind]) -> None:
    section, _, name = key.partition(".")
    before = ServingConfig()
    after = with_overrides(before, {section: {name: value}})
    (change,) = changes(before, after)
    assert change.key == key
    assert [kind for kind in KINDS if changes_for(kind, before, after)] == replaced


def test_a_secret_is_not_shown() -> None:
    (change,) = changes(ServingConfig(), with_overrides(ServingConfig(), {"engine": {"cache_salt": "hush"}}))
    assert str(change) == "engine.cache_salt"


def test_a_path_that_is_written_otherwise_is_no_change() -> None:
    before = with_overrides(ServingConfig(), {"planner": {"journal": "journal.jsonl"}})
    (path,) = (change.before for change in changes(before, ServingConfig()))
    assert not changes(before, with_overrides(ServingConfig(), {"planner": {"journal": path}}))
