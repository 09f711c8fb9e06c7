"""The progress of the prompts of one call, and their speed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int, int], None]
"""(prompts done, prompt tokens computed, output tokens), each since the beginning"""

_INTERVAL_S = 0.5


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Report]:
    """Rates are those of the last moment; at the end, those of the whole time."""
    if not shown:
        yield lambda done, prefill, decode: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rates = TextColumn("prefill {task.fields[prefill]:,.0f} tok/s  decode {task.fields[decode]:,.0f} tok/s")
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), rates, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, prefill=0.0, decode=0.0)
        began_s = time.monotonic()
        last = seen = (began_s, 0, 0)

        def show(since: tuple[float, int, int]) -> None:
            elapsed_s = max(1e-6, seen[0] - since[0])
            bar.update(task, prefill=(seen[1] - since[1]) / elapsed_s, decode=(seen[2] - since[2]) / elapsed_s)

        def report(done: int, prefill: int, decode: int) -> None:
            nonlocal last, seen
            seen = (time.monotonic(), prefill, decode)
            bar.update(task, completed=done)
            if seen[0] - last[0] >= _INTERVAL_S:
                show(last)
                last = seen

        try:
            yield report
        finally:
            show((began_s, 0, 0))
