"""GPU time of engine steps by kind of kernel, from torch's profiler."""

import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

_KINDS = {
    "attention": r"^_decode|^_prefill|flash|fmha",
    "norm, rope, activation": r"^_rms_norm|^_silu_mul|^_rotate_store|^_embed",
    "sampler": r"^_best_of",
    "matmul": r"gemm|gemv|nvjet|cutlass|splitk|split_k|cublas|^_small_linear|^_skinny",
    "copies": r"memcpy|memset",
}


def profile_steps(step: Callable[[], Any], count: int) -> dict[str, Any]:
    """Milliseconds per step, by kind of kernel. `idle` is the time in which the GPU ran nothing."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        wall_ms = (time.perf_counter() - started_s) * 1e3
    totals: dict[str, float] = defaultdict(float)
    kernels: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        milliseconds = event.self_device_time_total / 1e3 / (count + 1)
        if milliseconds > 0:
            totals[_kind(event.key)] += milliseconds
            kernels[f"{event.key[:90]} x{event.count / (count + 1):.0f}"] += milliseconds
    wall_ms /= count
    totals["idle"] = wall_ms - sum(totals.values())
    order = sorted(kernels.items(), key=lambda item: -item[1])
    return {"wall_ms": wall_ms, "ms": dict(totals), "kernels": dict(order[:14])}


def _kind(kernel: str) -> str:
    for kind, pattern in _KINDS.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return kind
    return "other"
