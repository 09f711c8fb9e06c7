"""How fast KV blocks go from one worker's slab into another's on one machine, between CPUs or between two GPUs.

    python benchmarks/kv_push.py [--device cpu|cuda] [--section raw,push] [--rounds 20] [--out FOLDER]

`raw`: what carries the bytes, alone: numpy's copy into shared memory; on GPUs one kernel over a peer's mapping, beside
cuMemcpyBatchAsync, for runs of one size at random places. `push`: the whole way through sender and receiver, from the
first layer_ready to the decode worker's Committed, with the processor time that a (chunk, layer) costs the sender.

CPU: SmolLM2-135M's slab (30 layers, 3 KV heads of 64, block 16, float32). GPU: Qwen3-8B's (36 layers, 8 KV heads of
128, bfloat16). The decode side is a process of its own, and so is the prefill side; each sees its own GPU alone.
"""

import argparse
import multiprocessing
import os
import queue
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from baton.config import TransferConfig
from baton_proto.worker import Grant
from benchmarks.machine import describe
from kvtransfer.events import Committed, TransferEvent
from kvtransfer.identity import SlabIdentity
from kvtransfer.layout import SlabLayout
from kvtransfer.memory_driver import MemoryDriver, memory_of
from kvtransfer.memory_range import PeerRange
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.slab import Slab

Device = Literal["cpu", "cuda"]
TIMEOUT_S = 120.0
CPU_LAYOUT = SlabLayout(num_layers=30, num_blocks=256, num_kv_heads=3, block_size=16, head_dim=64, dtype="float32")
GPU_LAYOUT = SlabLayout(num_layers=36, num_blocks=2560, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
RUN_KIB = (8, 16, 32, 64, 256)
LONG_RUN_KIB = (256, 512, 1024, 4096)  # what copy engines are measured with as well
RAW_MIB = (4, 64, 512)
PROMPT_TOKENS = {"cpu": (1024,), "cuda": (1024, 8192, 32768)}


@dataclass(frozen=True, slots=True)
class Case:
    """What both processes are told."""

    device: Device
    gpu: str  # CUDA_VISIBLE_DEVICES
    rounds: int
    socket_path: str

    def start(self) -> MemoryDriver:
        """Only now, in the child, is CUDA looked at."""
        if self.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu
        import torch

        if self.device == "cuda":
            torch.cuda.set_device(0)
        return memory_of(torch.device(self.device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--section", default="raw,push")
    parser.add_argument("--rounds", type=int, default=20, help="of each line; the median counts")
    parser.add_argument("--gpus", default="0,1", help="of the prefill and of the decode side")
    parser.add_argument("--out", type=Path, help="folder for the result")
    options = parser.parse_args()
    prefill_gpu, decode_gpu = options.gpus.split(",")
    spawn = multiprocessing.get_context("spawn")
    results: dict[str, Any] = {}
    for section in options.section.split(","):
        decode, prefill = SECTIONS[section]
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
        path = options.out / f"kv-push-{options.device}.json"
        document = {"benchmark": "kv_push", **describe(), "rows": results}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _rows(answers: Any, child: Any) -> list[dict[str, Any]]:
    """Until the prefill side says that it is done."""
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
    Console().print(table)


# --- raw --------------------------------------------------------------------------------------------------------------


def _raw_bytes(case: Case) -> int:
    return (RAW_MIB[-1] << 20) * 2 if case.device == "cuda" else 64 << 20


def raw_decode(case: Case, pipe: Connection, answers: Any) -> None:
    driver = case.start()
    layout = SlabLayout(1, _raw_bytes(case) >> 16, 8, 16, 128, "bfloat16")  # blocks of 64 KiB
    slab = Slab(layout, driver)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(case.socket_path)
        listener.listen()
        pipe.send("listening")
        sock, _ = listener.accept()
        socket.send_fds(sock, [b"x"], [slab.export()])
        sock.recv(1)  # until the prefill side has gone


def raw_prefill(case: Case, pipe: Connection, answers: Any) -> None:
    driver = case.start()
    assert pipe.recv() == "listening"
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(case.socket_path)
    _, fds, _, _ = socket.recv_fds(sock, 1, 1)
    peer = PeerRange(driver, fds[0], _raw_bytes(case), "the decode side")
    ours = Slab(SlabLayout(1, _raw_bytes(case) >> 16, 8, 16, 128, "bfloat16"), driver)
    if case.device == "cuda":
        for row in _raw_cuda(case, ours, peer):
            answers.put(row)
    else:
        source, destination = np.frombuffer(ours.buffer, dtype=np.uint8), np.asarray(peer.array)

        def copy() -> None:
            destination[:] = source

        seconds = _median_s(copy, case.rounds)
        answers.put({"way": "numpy", "MiB": len(source) >> 20, "run KiB": "all", "GB/s": len(source) / seconds / 1e9})
    answers.put(None)


def _raw_cuda(case: Case, ours: Slab, peer: PeerRange) -> Any:
    import torch

    from engine.kernels.copy_blocks import copy_blocks

    source = ours.tensor.flatten().view(torch.int64)
    destination = torch.as_tensor(peer.array, device=source.device).view(torch.int64)
    for mib in RAW_MIB:
        for kib in RUN_KIB:
            words, count = kib << 7, (mib << 20) // (kib << 10)
            rows = (source.view(-1, words), destination.view(-1, words))
            if kib < 64:  # a range of heads of each block of 64 KiB
                count = min(count, len(source) // (64 << 7))
                rows = (source.view(-1, 64 << 7)[:, :words], destination.view(-1, 64 << 7)[:, words : 2 * words])
            places = torch.stack([torch.randperm(len(rows[0]))[:count] for _ in range(2)]).to(torch.int32)
            table = places.to(source.device)
            nbytes = count * kib << 10

            def copy(rows: Any = rows, table: Any = table) -> None:
                copy_blocks(rows[0], rows[1], table)

            alone_s, host_s = _gpu_median_s(copy, case.rounds)
            row = {"way": "kernel", "MiB": nbytes >> 20, "run KiB": kib, "GB/s": nbytes / alone_s / 1e9}
            yield {**row, "us": alone_s * 1e6, "host us": host_s * 1e6}
            if kib == RUN_KIB[-1] and mib < RAW_MIB[-1]:
                yield from _engine_rows(case, source, destination, mib)
            if kib == 64:
                batch = _batch_copy(rows, places.tolist(), kib << 10)
                alone_s, host_s = _gpu_median_s(batch, min(case.rounds, 5))
                row |= {"way": "cuMemcpyBatchAsync", "GB/s": nbytes / alone_s / 1e9}
                yield {**row, "us": alone_s * 1e6, "host us": host_s * 1e6}
    torch.cuda.synchronize()


def _engine_rows(case: Case, source: Any, destination: Any, mib: int) -> Any:
    import torch

    driver = memory_of(source.device)
    stream = torch.cuda.current_stream().cuda_stream
    for kib in LONG_RUN_KIB:
        nbytes = kib << 10
        count = (mib << 20) // nbytes
        places = torch.stack([torch.randperm(source.nbytes // nbytes)[:count] for _ in range(2)]).T.tolist()

        def copy(nbytes: int = nbytes, places: Any = places) -> None:
            for ours, theirs in places:
                driver.copy(destination.data_ptr() + theirs * nbytes, source.data_ptr() + ours * nbytes, nbytes, stream)

        alone_s, host_s = _gpu_median_s(copy, case.rounds)
        row = {"way": "copy engine", "MiB": mib, "run KiB": kib, "GB/s": (mib << 20) / alone_s / 1e9}
        yield {**row, "us": alone_s * 1e6, "host us": host_s * 1e6}


def _batch_copy(rows: Any, places: list[list[int]], nbytes: int) -> Callable[[], None]:
    import torch
    from cuda.bindings import driver as cuda

    source, destination = (row.data_ptr() for row in rows)
    sources = [cuda.CUdeviceptr(source + block * nbytes) for block in places[0]]
    destinations = [cuda.CUdeviceptr(destination + block * nbytes) for block in places[1]]
    count = len(sources)
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # it refuses the null stream

    def copy() -> None:
        start = torch.cuda.current_stream()
        stream.wait_stream(start)
        answer = cuda.cuMemcpyBatchAsync(
            destinations, sources, [nbytes] * count, count, [attributes], [0], 1, stream.cuda_stream
        )
        if answer[0] != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemcpyBatchAsync: {answer}")
        start.wait_stream(stream)

    return copy


def _gpu_median_s(call: Callable[[], None], rounds: int) -> tuple[float, float]:
    """On the device, and on the host until it is enqueued."""
    import torch

    for _ in range(3):
        call()
    device_s, host_s = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host is ahead, so that its time is not the device's
        start.record()
        begin_s = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - begin_s)
        end.record()
        end.synchronize()
        device_s.append(start.elapsed_time(end) / 1e3)
    return statistics.median(device_s), statistics.median(host_s)


def _median_s(call: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])  # the first one touches the pages


# --- push -------------------------------------------------------------------------------------------------------------


def _lines(device: Device) -> list[tuple[str, int, str]]:
    """transport, tokens of the prompt, where its blocks lie"""
    if device == "cpu":
        return [(transport, 1024, order) for transport in ("shm", "tcp") for order in ("runs", "random")]
    return [("cuda_ipc", tokens, "random") for tokens in PROMPT_TOKENS["cuda"]] + [("tcp", 8192, "random")]


def _blocks(order: str, count: int, seed: int, of: int) -> list[int]:
    if order == "runs":
        return list(range(count))
    return np.random.default_rng(seed).permutation(of)[:count].tolist()


def _layout(device: Device) -> SlabLayout:
    return CPU_LAYOUT if device == "cpu" else GPU_LAYOUT


def push_decode(case: Case, pipe: Connection, answers: Any) -> None:
    driver, layout = case.start(), _layout(case.device)
    slab = Slab(layout, driver)
    for transport, tokens, order in _lines(case.device):
        events: queue.Queue[TransferEvent] = queue.Queue()
        config = TransferConfig(transport=transport)  # type: ignore[arg-type]
        receiver = Receiver(slab, SlabIdentity("decode", 1, "model", layout), config, "127.0.0.1", events.put)
        for number in range(case.rounds + 1):
            pipe.send(receiver.reserve(_blocks(order, tokens // layout.block_size, number, layout.num_blocks), 0))
            while not isinstance(events.get(timeout=TIMEOUT_S), Committed):
                pass
            pipe.send("committed")
            assert pipe.recv() == "next"
        receiver.close()
        pipe.send("closed")


def push_prefill(case: Case, pipe: Connection, answers: Any) -> None:
    driver, layout = case.start(), _layout(case.device)
    slab = Slab(layout, driver)
    for transport, tokens, order in _lines(case.device):
        sender = Sender(slab, SlabIdentity("prefill", 1, "model", layout), TransferConfig(transport=transport))  # type: ignore[arg-type]
        source = _blocks(order, tokens // layout.block_size, 1000, layout.num_blocks)
        times, costs = [], []
        while isinstance(grant := pipe.recv(), Grant):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            done: queue.Queue[Any] = queue.Queue()
            push = sender.begin(grant, done.put)
            for layer in range(layout.num_layers):
                push.layer_ready(layer, 0, source, slab.mark())
            push.commit(b"")
            assert pipe.recv() == "committed"
            times.append(time.perf_counter() - begin_s)
            assert done.get(timeout=TIMEOUT_S).ok
            costs.append(time.process_time() - begin_cpu_s)
            pipe.send("next")
        sender.close()
        nbytes = len(source) * layout.num_layers * layout.block_bytes
        seconds = statistics.median(times[1:])  # the first one connects
        row = {"way": transport, "tokens": tokens, "blocks": order, "MB": nbytes / 1e6, "ms": seconds * 1e3}
        cost_us = statistics.median(costs[1:]) / layout.num_layers * 1e6
        answers.put(row | {"GB/s": nbytes / seconds / 1e9, "CPU us a layer": cost_us, "connect ms": times[0] * 1e3})
    answers.put(None)
    threading.Event().wait()  # until the other side was heard


SECTIONS = {"raw": (raw_decode, raw_prefill), "push": (push_decode, push_prefill)}

if __name__ == "__main__":
    main()
