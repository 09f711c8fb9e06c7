"""Groups of commands that are imported when they are used: `baton status` does not wait for the imports of `baton
profile`, and neither does the help of a group."""

import ast
import importlib.util
import inspect
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from baton.cli.left_flags import refuse_left_flags
from baton.cli.terminal.exit_codes import EXIT_CODES_HELP


def plain_app(**settings: Any) -> typer.Typer:
    """Help and errors in plain lines, which stay whole in pipes and logs."""
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, epilog=EXIT_CODES_HELP, **settings
    )


def lazy_group(places: Mapping[str, str]) -> type[TyperGroup]:
    """A class for plain_app(cls=...). `places`: `module:name` by command, in the order of the help; the name of a
    function, or of a typer.Typer with further commands."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = _Commands(places)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            """Whole sentences, over several lines where they are long."""
            with formatter.section("Commands"):
                formatter.write_dl([(name, _summary(place)) for name, place in places.items()])

    return LazyGroup


class _Commands(UserDict[str, Any]):
    """Click's commands by name. A command that was not used yet is a place."""

    def __getitem__(self, name: str) -> Any:
        command = self.data[name]
        if isinstance(command, str):
            command = self.data[name] = _load(name, command)
        return command


def _load(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = plain_app()
        app.command(name, cls=_GroupedOptions, epilog=EXIT_CODES_HELP)(options_apart(found))
        found = app
    command = typer.main.get_command(found)
    command.name = name
    return command


def options_apart(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command as typer reads it: each field of a dataclass among its parameters is an option of its own."""
    signature = inspect.signature(command)
    kinds = {name: given.annotation for name, given in signature.parameters.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}

    @wraps(command)
    def run(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)

    apart: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        options = fields(groups[name]) if name in groups else ()
        apart += [inspect.Parameter(one.name, kind, default=one.default, annotation=one.type) for one in options]
        apart += [] if name in groups else [parameter.replace(kind=kind)]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in apart}
    vars(run)["__signature__"] = signature.replace(parameters=apart)
    return run


def _summary(place: str) -> str:
    """The first sentence of what the command says of itself, read from its source: to import them all takes seconds."""
    module, _, name = place.partition(":")
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    functions = [node for node in ast.parse(Path(found.origin).read_bytes()).body if isinstance(node, ast.FunctionDef)]
    told = next(one for one in functions if one.name == name or (name == "app" and one.decorator_list))
    paragraph = (ast.get_docstring(told) or "").split("\n\n")[0].replace("\n", " ")
    return paragraph.partition(". ")[0].removesuffix(".") + "."


class _GroupedOptions(TyperCommand):
    """Options stand below the group that they name as `rich_help_panel`, as typer has it for its own help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_left_flags(self.name, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or usual, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)
