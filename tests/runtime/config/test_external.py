"""The section `external_workers`: what is refused, by which name, and with which way out."""

from pathlib import Path
from typing import Any

import pytest

from runtime.config.paths import with_absolute_paths
from runtime.config.serving import parse_config
from runtime.errors import ConfigError

GOOD = {"name": "gpu-7", "address": "http://h:8000", "events": "tcp://h:5557", "replay": "tcp://h:5558"}


def test_an_external_worker_is_found_by_its_name() -> None:
    config = parse_config({"external_workers": [GOOD, GOOD | {"name": "gpu-8", "model": "qwen"}]})
    found = config.external_worker("gpu-8")
    assert found is not None
    assert found.model == "qwen"
    assert config.external_worker("decode-1") is None


def test_the_file_with_its_key_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(parse_config({"external_workers": [GOOD | {"api_key_file": "vllm.key"}]}))
    assert config.external_workers[0].api_key_file == str(tmp_path / "vllm.key")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"adress": "x"}, r"external_workers\[0\].adress: unknown key; the nearest known one is .*address"),
        ({"name": "a b"}, r'external_workers\[0\].name: "a b" is not a name of up to 64 letters, digits, - and _'),
        ({"name": "decode-1"}, "name is decode-1, which `baton up` gives to a process of its own, or to a rank"),
        ({"name": "gpu-dp1"}, "name is gpu-dp1, which"),
        ({"name": "nats"}, "name is nats, which"),
        ({"address": "h:8000"}, "address is 'h:8000', not an address such as http://HOST:PORT"),
        ({"events": "http://h:5557"}, "events is 'http://h:5557', not an address such as tcp://HOST:PORT"),
        ({"replay": "tcp://h"}, "replay is 'tcp://h', not an address such as tcp://HOST:PORT"),
        ({"replay": "tcp://h:123456"}, "replay is 'tcp://h:123456', not an address"),
    ],
)
def test_what_is_wrong_is_named_with_a_way_out(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_config({"external_workers": [GOOD | changes]})


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"external_workers\[0\].*replay is '', not an address"):
        parse_config({"external_workers": [{key: GOOD[key] for key in ("name", "address", "events")}]})


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the name gpu-7 is given twice"):
        parse_config({"external_workers": [GOOD, GOOD]})


def test_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="external_workers: a section is not a list"):
        parse_config({"external_workers": GOOD})
