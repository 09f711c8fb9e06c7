"""A command of `baton` is one file and one row."""

import importlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.app import COMMANDS, app as cli
from baton.cli.events.app import COMMANDS as EVENTS
from baton.cli.lazy_group import lazy_group, plain_app
from baton.cli.terminal.output import counted, rounded


def test_a_row_and_its_file_are_all_that_a_command_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greeting.py").write_text(
        "import typer\n\n\ndef greet(name: str) -> None:\n    '''Greet somebody.'''\n    typer.echo('hello ' + name)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    app = plain_app(cls=lazy_group(COMMANDS | {"greet": "greeting:greet"}))
    app.callback()(lambda: None)
    assert CliRunner().invoke(app, ["greet", "Ada"]).stdout == "hello Ada\n"
    assert "Greet somebody." in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_row_names_a_function_or_a_group_that_explains_itself(name: str) -> None:
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, typer.Typer) or found.__doc__


EACH = [
    [],
    *([name] for name in COMMANDS),
    *(["events", name] for name in EVENTS),
    ["plan", "replay"],
]


@pytest.mark.parametrize("command", EACH, ids=" ".join)
def test_the_help_of_each_command_names_the_exit_codes(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0
    assert "Exit codes" in result.output


@pytest.mark.parametrize("group", [[], ["events"], ["plan"]], ids=str)
def test_the_help_of_a_group_shows_whole_sentences_within_80_columns(group: list[str]) -> None:
    said = CliRunner().invoke(cli, [*group, "--help"], terminal_width=80).stdout
    assert "..." not in said.partition("Commands:")[2]
    assert max(map(len, said.splitlines())) <= 80


def test_people_read_few_digits_and_the_right_plural() -> None:
    shown = [rounded(value) for value in (0.0, 0.0334, 8.38293, 9.97, 12.5, 12.0, 99.97, 1234.5)]
    assert shown == ["0", "0.033", "8.4", "10", "12.5", "12", "100", "1,234"]
    assert [counted(number, "batch") for number in (0, 1, 2)] == ["0 batches", "1 batch", "2 batches"]
