"""The layouts that some GPUs allow: mixed workers, and prefill beside decode workers in all splits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from simulator.stepwise.fleet import Layout, WorkerKind

MOST_SPLITS = 31  # of two sizes of workers; of more, as many are taken at even distances


def layouts(
    kinds: Sequence[WorkerKind], gpus: int, mixed_tokens: Sequence[int], prefill_tokens: int
) -> tuple[list[Layout], list[Layout]]:
    """(mixed ones, splits). `kinds`: workers of different numbers of GPUs. `mixed_tokens`: budgets of a mixed worker's
    step to try. `prefill_tokens`: the budget of a prefill worker's."""
    mixed = [
        Layout(0, made, gpus // kind.gpus, made)
        for kind in kinds
        for tokens in mixed_tokens
        if gpus >= kind.gpus
        for made in [replace(kind, max_batch_tokens=tokens)]
    ]
    splits: list[Layout] = []
    for p, d in product(kinds, kinds):
        counts = [count for count in range(1, gpus // p.gpus + 1) if gpus - count * p.gpus >= d.gpus]
        step = -(-len(counts) // MOST_SPLITS) or 1
        prefill = replace(p, max_batch_tokens=prefill_tokens)
        splits += [Layout(count, prefill, (gpus - count * p.gpus) // d.gpus, d) for count in counts[::step]]
    return mixed, splits


def name(layout: Layout) -> str:
    """'8 mixed, 512 tokens a step' or '3P + 5D'; with the GPUs of a worker where it has several."""

    def shown(count: int, role: str, kind: WorkerKind) -> str:
        return f"{count}{role}" + (f" x {kind.gpus} GPUs" if kind.gpus > 1 else "")

    if layout.prefill:
        return f"{shown(layout.prefill, 'P', layout.prefill_kind)} + {shown(layout.decode, 'D', layout.decode_kind)}"
    return f"{shown(layout.decode, ' mixed', layout.decode_kind)}, {layout.decode_kind.max_batch_tokens} tokens a step"
