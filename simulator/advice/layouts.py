"""The layouts that some GPUs allow: mixed workers, and prefill beside decode workers in all splits."""

from collections.abc import Sequence
from itertools import product

from simulator.stepwise.fleet import Layout, WorkerKind

MOST_SPLITS = 31  # of two sizes of workers; of more, as many are taken at even distances


def layouts(kinds: Sequence[WorkerKind], gpus: int) -> tuple[list[Layout], list[Layout]]:
    """(mixed ones, splits). `kinds`: workers of different numbers of GPUs."""
    mixed = [Layout(0, kind, gpus // kind.gpus, kind) for kind in kinds if gpus >= kind.gpus]
    splits: list[Layout] = []
    for p, d in product(kinds, kinds):
        counts = [count for count in range(1, gpus // p.gpus + 1) if gpus - count * p.gpus >= d.gpus]
        step = -(-len(counts) // MOST_SPLITS) or 1
        splits += [Layout(count, p, (gpus - count * p.gpus) // d.gpus, d) for count in counts[::step]]
    return mixed, splits


def name(layout: Layout) -> str:
    """'8 mixed' or '3P + 5D'; with the GPUs of a worker where it has several."""

    def shown(count: int, role: str, kind: WorkerKind) -> str:
        return f"{count}{role}" + (f" x {kind.gpus} GPUs" if kind.gpus > 1 else "")

    if layout.prefill:
        return f"{shown(layout.prefill, 'P', layout.prefill_kind)} + {shown(layout.decode, 'D', layout.decode_kind)}"
    return shown(layout.decode, " mixed", layout.decode_kind)
