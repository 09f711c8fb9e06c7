"""How many workers a flag of `baton up` asks for."""

import pytest
import typer

from baton.cli.up import worker_counts
from runtime.config.overrides import with_overrides
from runtime.config.serving import parse_config

FILE = parse_config({"workers": {"engine": "vllm", "decode": {"vllm": 3}}})


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        ("2", {"vllm": 2}),
        ("0", {"vllm": 0}),
        ("baton=1,vllm=2", {"baton": 1, "vllm": 2}),
        ("baton=1", {"baton": 1}),
        ("baton=0", {"baton": 0}),
    ],
)
def test_a_flag_takes_the_place_of_all_that_the_file_says_of_the_role(text: str, engines: dict[str, int]) -> None:
    config = with_overrides(FILE, {"workers": {"decode": worker_counts(text)}})
    assert config.workers.by_engine("decode") == engines
    assert config.workers.by_engine("prefill") == {"vllm": 1}


@pytest.mark.parametrize(
    "text", ["-1", "two", "", "vlm=1", "vllm=-1", "vllm=1=2", "vllm", "99999", "baton=1,baton=2", "vllm=null"]
)
def test_what_is_no_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"counts of baton or vllm such as baton=1,vllm=2"):
        worker_counts(text)
