"""A module's source without the decorators that hide functions from mutmut, which changes no decorated function."""

import ast
from typing import Final

NEEDLESS: Final = ("compiled", "inlined", "lru_cache")
"""Functions answer the same without these, only later. An undecorated one is never compiled, so its mutants run."""


def undecorated(source: str) -> str:
    """The source with empty lines where module-level functions had a needless decorator."""
    lines = source.splitlines(keepends=True)
    for function in ast.parse(source).body:
        for decorator in function.decorator_list if isinstance(function, ast.FunctionDef) else ():
            name = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(name, ast.Name) and name.id in NEEDLESS:
                last = decorator.end_lineno or decorator.lineno
                lines[decorator.lineno - 1 : last] = ["\n"] * (last - decorator.lineno + 1)
    return "".join(lines)
