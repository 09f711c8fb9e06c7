"""The machine and the versions that a result names as its origin.

torch is imported where it is needed, because it takes seconds and clients, which are processes of their own, need none.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "flash-attn-4", "numpy")


def describe(commit: str | None = None) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": commit or os.environ.get("BATON_COMMIT") or _commit(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_result(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def measure_ceilings() -> dict[str, float]:
    """What this GPU reaches now; two GPUs of one kind differ by 5 % and more. Takes 1.5 GB of its memory meanwhile."""
    import torch

    source = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy_s, product_s = _median_s(lambda: target.copy_(source)), _median_s(lambda: a @ b)
    return {"copy_tb_s": 2 * source.nbytes / copy_s / 1e12, "matmul_tflop_s": 2 * 8192**3 / product_s / 1e12}


def _median_s(call: Callable[[], Any], repeats: int = 20) -> float:
    import torch

    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def seconds_since_process_start() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")


def process_cpu_us(pid: int) -> float:
    """The CPU time of all threads that live, finer than the ticks of /proc/PID/stat."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e3


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
