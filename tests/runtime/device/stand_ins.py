"""Stand-ins for Triton's kernels: they remember what they get."""

from typing import Any

from triton.runtime import JITFunction


class Compiled:
    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []  # (grid, arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel(JITFunction):  # type: ignore[misc]
    """Compiles at its first launch, as Triton does, and takes `SIZE` as a constant."""

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.first: list[Any] = []

    @property
    def arg_names(self) -> list[str]:
        return ["source", "target", "count", "SIZE"]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.first.append((grid, arguments, constants))
            return self.compiled

        return launch
