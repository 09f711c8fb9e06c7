"""A pytest plugin for runs with mutants: tests with random examples come last, their examples are the same in each run,
and those that fail are not made smaller. Most mutants are killed before, in a fraction of the time."""

import pytest
from hypothesis import Phase, settings


def pytest_configure() -> None:
    settings.register_profile(
        "mutants", settings(), phases=(Phase.explicit, Phase.generate), derandomize=True, database=None
    )
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: getattr(getattr(item, "obj", None), "is_hypothesis_test", False))
