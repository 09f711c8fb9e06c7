"""YAML files: a key that is given twice is refused with its line."""

from pathlib import Path

import pytest

from runtime.config.yaml_file import read_yaml
from runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: mock\nmodel: smollm2\n", r"line 2 gives 'model' again, which line 1 gives: keep one"),
        ("router:\n  ui: true\n  http_port: 1\n  ui: false\n", r"line 4 gives 'ui' again, which line 2 gives"),
        ("external_workers:\n- {name: a, name: b}\n", r"line 2 gives 'name' again, which line 2 gives"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_its_lines(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "serving.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"serving\.yaml: .*{words}"):
        read_yaml(tmp_path / "serving.yaml")


@pytest.mark.parametrize("text", ["vllm: &a {x: *a}\n", "vllm: &a [*a]\n", "a: &a {b: [&c {d: *a}]}\n"])
def test_a_value_that_is_part_of_itself_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "serving.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"serving\.yaml: not valid YAML: found unconstructable recursive node"):
        read_yaml(tmp_path / "serving.yaml")


def test_several_mappings_may_be_merged_into_one(tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").write_text("a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\nd: *a\n")
    data = read_yaml(tmp_path / "serving.yaml")
    assert (data["c"], data["d"]) == ({"x": 1, "y": 2}, {"x": 1})


def test_sections_may_have_keys_of_one_name_and_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").write_text("a: &a {host: x}\nb: {host: y}\nc: {<<: *a, host: z}\n")
    assert read_yaml(tmp_path / "serving.yaml") == {"a": {"host": "x"}, "b": {"host": "y"}, "c": {"host": "z"}}
