"""The order in which files of tests run, and which of pytest-xdist's processes gets them."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

STARTS = (
    "running_service(",
    "planned_service(",
    "running_fleet(",
    "SharedService(",
    "baton_up(",
    "start_worker(",
    "LLM(",
    "Popen(",
    "subprocess.run(",
)
"""What starts processes, which takes seconds."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files first that take long, because a run should end with short ones: files with Ray, then those that start
    processes or have slow tests, then those with many tests."""
    counts = Counter(item.path for item in items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))

    def order(item: pytest.Item) -> tuple[bool, int, int, Path]:
        text = text_of(item.path)
        starts = sum(map(text.count, STARTS))
        return not starts_ray(text), -starts - slow[item.path], -counts[item.path], item.path

    items.sort(key=order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    config.option.loadscopereorder = False
    return WholeFiles(config, log)


class WholeFiles(LoadFileScheduling):
    """Gives whole files to the processes. Files that share what a conftest.py beside them starts for the session go to
    the same process; and so do all files with Ray, because `ray stop` ends every cluster of a machine."""

    def _split_scope(self, nodeid: str) -> str:
        file = self.config.rootpath / nodeid.partition("::")[0]
        if starts_ray(text_of(file)):
            return "ray"
        beside = file.with_name("conftest.py")
        shares = beside.parent.name != "tests" and beside.exists() and 'scope="session"' in text_of(beside)
        return str(file.parent if shares else file)


def starts_ray(text: str) -> bool:
    return "pytest.mark.ray" in text


@cache
def text_of(path: Path) -> str:
    return path.read_text()
