"""The result file of a comparison of whole systems, and one of several parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.whole.figures import Run
from benchmarks.whole.report import Expectation
from runtime.errors import ConfigError


class Document(Struct):
    """The result file. `versions`: of vLLM, as its server says. `ready_s`: from the start of a system."""

    machine: dict[str, Any]
    commands: list[str]  # of all parts
    settings: dict[str, str]
    gpus: int
    versions: dict[str, str] = {}
    ready_s: dict[str, float] = {}
    problems: dict[str, str] = {}  # of systems that could not be measured
    runs: list[Run] = []
    expectations: list[Expectation] = []


def merged(paths: Sequence[Path]) -> Document:
    """Raises ConfigError when the parts are of several machines or commits, or one load is in two of them."""
    parts = []
    for path in paths:
        try:
            parts.append(msgspec.json.decode(path.read_bytes(), type=Document))
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError("--merge", f"{path}: {error}") from error
    whole = parts[0]
    seen = {(run.system, run.cell, run.seed) for run in whole.runs}
    for path, part in zip(paths[1:], parts[1:], strict=True):
        for key in ("gpu", "gpus", "commit"):
            if part.machine[key] != whole.machine[key]:
                problem = f"{path} is of {key} {part.machine[key]}, {paths[0]} of {whole.machine[key]}"
                raise ConfigError("--merge", f"{problem}: merge parts of one machine and commit")
        again = [run for run in part.runs if (run.system, run.cell, run.seed) in seen]
        if again:
            problem = f"{path} has {again[0].system} under {again[0].cell}, as another file has"
            raise ConfigError("--merge", f"{problem}: leave one of them out")
        seen |= {(run.system, run.cell, run.seed) for run in part.runs}
        whole.runs += part.runs
        whole.expectations += part.expectations
        whole.commands += part.commands
        whole.versions |= part.versions
        whole.ready_s |= part.ready_s
        whole.problems |= part.problems
    return whole
