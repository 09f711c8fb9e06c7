"""A pytest plugin that compiles kernels for Hopper on any machine instead of running them, because Triton's interpreter
runs what its compiler refuses. Of each test it takes the last parameters; what it asserts does not matter. At the
end it prints which kernels were compiled, and what was refused."""

import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engine.kernels import dependent_launch

compiled: Counter[str] = Counter()
refused: dict[str, str] = {}  # by test
run = JITFunction.run


def compile_alone(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
    found = run(kernel, *arguments, grid=grid, warmup=True, **constants)
    compiled[kernel.__name__] += 1
    return found


JITFunction.run = compile_alone
dependent_launch.dependent_launch = lambda tensor: {"OVERLAP": True, "launch_pdl": True}  # before kernels are imported
driver.set_active(
    SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_stream=lambda device: 0,
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = {item.nodeid.partition("[")[0]: item for item in items}.values()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None and isinstance(call.excinfo.value, CompilationError):
        refused[item.nodeid] = str(call.excinfo.getrepr(style="value"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"compiled: {', '.join(sorted(compiled))}")
    for test, why in refused.items():
        terminalreporter.write_line(f"refused: {test}: {why}")
