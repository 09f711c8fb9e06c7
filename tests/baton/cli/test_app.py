"""A command of `baton` is one file and one row."""

import importlib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.app import COMMANDS
from baton.cli.lazy_group import lazy_group, plain_app


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
