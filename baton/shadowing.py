"""Another package with the name of one of ours, which Python finds first, is reported in one line, not a traceback."""

import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("baton_proto", "decode_worker", "engine", "kvtransfer", "planner"),
    *("prefill_worker", "router", "runtime", "simulator", "worker"),
)
USAGE = 2  # as baton.cli.terminal.exit_codes says, which cannot be imported yet


def refuse_shadowed(names: Collection[str] = PACKAGES) -> None:
    """Ends the process with code 2 when one of these packages would be imported from elsewhere. Imports nothing."""
    for name in names:
        spec = find_spec(name)
        place = "" if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        if place and Path(place).parent not in (ROOT / name, ROOT / "proto" / name):
            remedy = "rename it, start from another folder, or take its folder out of PYTHONPATH"
            print(f"error: {place} hides Baton's own package {name!r}; {remedy}", file=sys.stderr)
            raise SystemExit(USAGE)


def guard_imports() -> None:
    """From now on the first import of each of our packages is checked. Child processes check nothing."""
    sys.meta_path.insert(0, _Guard())


class _Guard(MetaPathFinder):
    def __init__(self) -> None:
        self._unchecked = set(PACKAGES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._unchecked:
            self._unchecked.discard(fullname)
            refuse_shadowed([fullname])
        return None
