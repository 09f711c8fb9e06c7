"""Speed of KV blocks on their way from one worker's slab into another's on one machine, between CPUs or two GPUs.

    python benchmarks/kv_push.py [--device cpu|cuda] [--section raw,nccl,push] [--with-nixl] [--out FOLDER]

`raw`: the copy alone: numpy's copy into shared memory; on GPUs one kernel over a peer's mapping, beside
cuMemcpyBatchAsync, for runs of one size at random places. `nccl`, only on GPUs: gather, send and scatter of random
blocks, from the first `write` to the answer that all blocks are in place. `push`: the whole way through sender and
receiver, from the first layer_ready to the decode worker's Committed, and the sender's host time per (chunk, layer).

CPU: SmolLM2-135M's slab (30 layers, 3 KV heads of 64, block 16, float32). GPU: Qwen3-8B's (36 layers, 8 KV heads of
128, bfloat16). Each side is a process of its own and sees only its own GPU.
"""

import argparse
import importlib.util
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe, write_result
from benchmarks.transfer import nccl, nixl, push, raw
from benchmarks.transfer.case import Case

SECTIONS = {"raw": raw, "nccl": nccl, "push": push, "nixl": nixl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--section", help="default: all that the device has")
    parser.add_argument("--rounds", type=int, default=20, help="of each line; the median counts")
    parser.add_argument("--gpus", default="0,1", help="of the prefill and of the decode side")
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--with-nixl", action="store_true", help="and NIXL beside it, installed if it is not")
    options = parser.parse_args()
    if options.with_nixl and importlib.util.find_spec("nixl_cu13") is None:
        _install_nixl()
    prefill_gpu, decode_gpu = options.gpus.split(",")
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {}
    sections = options.section or ("raw,push" if options.device == "cpu" else "raw,nccl,push")
    for section in sections.split(",") + (["nixl"] if options.with_nixl else []):
        decode, prefill = SECTIONS[section].decode, SECTIONS[section].prefill
        with tempfile.TemporaryDirectory() as folder:
            case = Case(options.device, decode_gpu, options.rounds, f"{folder}/raw.sock")
            ours, theirs = spawn.Pipe()
            answers = spawn.Queue()
            children = [
                spawn.Process(target=decode, args=(case, theirs, answers), daemon=True),
                spawn.Process(target=prefill, args=(replace(case, gpu=prefill_gpu), ours, answers), daemon=True),
            ]
            for child in children:
                child.start()
            results[section] = _rows(answers, children[1])
            for child in children:
                child.terminate()
                child.join(10)
        _show(section, results[section])
    if options.out is not None:
        document = {"benchmark": "kv_push", **describe(), "rows": results}
        write_result(options.out / f"kv-push-{options.device}.json", document)


def _rows(answers: Any, child: Any) -> list[dict[str, Any]]:
    """Collects the prefill side's rows until that side says that it is done."""
    rows: list[dict[str, Any]] = []
    while True:
        try:
            row = answers.get(timeout=1.0)
        except queue.Empty:
            if not child.is_alive():
                raise SystemExit("the prefill side ended early") from None
            continue
        if row is None:
            return rows
        rows.append(row)


def _show(section: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=section)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=120).print(table)


def _install_nixl() -> None:
    """Installs NIXL into a folder of its own, for the processes that this one starts."""
    folder = tempfile.mkdtemp(prefix="baton-nixl-")
    package = f"nixl-cu13=={nixl.VERSION}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, package], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])


if __name__ == "__main__":
    main()
