"""A half of a comparison: a process of its own, in its own virtual environment, that answers one call at a time.

The driver keeps both halves alive and calls them in turns, so that other work of the machine slows both equally. A call
is one line of JSON on the child's stdin; the answer is one line on its stdout. Standard library only, because this
module also runs in the peer's environment.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class HalfFailedError(Exception):
    def __init__(self, module: str, call: str, reason: str) -> None:
        super().__init__(f"{module}: {call} failed: {reason}")


class Half:
    """The driver's end of the connection."""

    def __init__(self, python: Path, module: str) -> None:
        self._module = module
        environment = os.environ | {"DYN_LOG": "off", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """Calls a method of the child. Raises HalfFailedError with the child's message."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise HalfFailedError(self._module, name, f"the process ended with {self._process.wait(timeout=10)}")
        answer = json.loads(line)
        if "error" in answer:
            raise HalfFailedError(self._module, name, answer["error"])
        return answer["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(target: object) -> None:
    """The child's end: answers calls with the public methods of `target` until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that what a library prints is not taken for an answer
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": _method(target, name)(**arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _method(target: object, name: str) -> Callable[..., Any]:
    methods: Mapping[str, Any] = {key: getattr(target, key) for key in dir(target) if not key.startswith("_")}
    method: Callable[..., Any] = methods[name]
    return method
