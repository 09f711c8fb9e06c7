"""The whole way of a prompt's KV: sender, link, receiver, ledger.

`host us` is the time per layer of the thread that computes the prompt. `CPU us` is the processor time per layer of the
whole process. It includes the link's thread, which spins in the first millisecond of a wait.
"""

import queue
import statistics
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from baton_proto.worker import Grant
from benchmarks.transfer.case import Case, Device
from kvtransfer.decode_side.events import Committed, TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.serving import TransferConfig
from runtime.security.cluster_key import ClusterKey
from runtime.security.secret import MIN_LENGTH, Secret

TIMEOUT_S = 120.0
TLS = "tcp with TLS"
CPU_LAYOUT = SlabLayout(num_layers=30, num_blocks=256, num_kv_heads=3, block_size=16, head_dim=64, dtype="float32")
GPU_LAYOUT = SlabLayout(num_layers=36, num_blocks=2560, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16")
PROMPT_TOKENS = (1024, 8192, 32768)


def _lines(device: Device) -> list[tuple[str, int, str]]:
    """The lines of the table: transport, tokens of the prompt, where its blocks lie."""
    if device == "cpu":
        return [(transport, 1024, order) for transport in ("shm", "tcp", TLS) for order in ("runs", "random")]
    lines = [(transport, tokens, "random") for transport in ("cuda_ipc", "nccl") for tokens in PROMPT_TOKENS]
    return [*lines, ("tcp", 8192, "random"), (TLS, 8192, "random")]


def _settings(way: str) -> tuple[TransferConfig, ClusterKey | None]:
    if way == TLS:
        return TransferConfig(transport="tcp"), ClusterKey(Secret("0" * MIN_LENGTH), "auto")
    return TransferConfig(transport=way), None


def _blocks(order: str, count: int, seed: int, of: int) -> list[int]:
    if order == "runs":
        return list(range(count))
    return np.random.default_rng(seed).permutation(of)[:count].tolist()


def _layout(device: Device) -> SlabLayout:
    return CPU_LAYOUT if device == "cpu" else GPU_LAYOUT


def decode(case: Case, pipe: Connection, answers: Any) -> None:
    driver, layout = case.start(), _layout(case.device)
    slab = Slab(layout, driver)
    for transport, tokens, order in _lines(case.device):
        events: queue.Queue[TransferEvent] = queue.Queue()
        config, key = _settings(transport)
        identity = SlabIdentity("decode", 1, "model", layout)
        receiver = Receiver(slab, identity, config, "127.0.0.1", events.put, key=key)
        for number in range(case.rounds + 1):
            pipe.send(receiver.reserve(_blocks(order, tokens // layout.block_size, number, layout.num_blocks), 0))
            while not isinstance(events.get(timeout=TIMEOUT_S), Committed):
                pass
            pipe.send("committed")
            assert pipe.recv() == "next"
        receiver.close()
        pipe.send("closed")


def prefill(case: Case, pipe: Connection, answers: Any) -> None:
    driver, layout = case.start(), _layout(case.device)
    slab = Slab(layout, driver)
    for transport, tokens, order in _lines(case.device):
        sender = Sender(slab, SlabIdentity("prefill", 1, "model", layout), *_settings(transport))
        source = tuple(_blocks(order, tokens // layout.block_size, 1000, layout.num_blocks))
        times, calls, costs = [], [], []
        while isinstance(grant := pipe.recv(), Grant):
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            done: queue.Queue[Any] = queue.Queue()
            push = sender.begin(grant, done.put)
            for layer in range(layout.num_layers):
                push.layer_ready(layer, 0, source, slab.mark())
            calls.append(time.perf_counter() - begin_s)
            push.commit(b"")
            assert pipe.recv() == "committed"
            times.append(time.perf_counter() - begin_s)
            assert done.get(timeout=TIMEOUT_S).ok
            costs.append(time.process_time() - begin_cpu_s)
            pipe.send("next")
        sender.close()
        nbytes = len(source) * layout.num_layers * layout.block_bytes
        seconds = statistics.median(times[1:])  # without the first one, which connects
        row = {"way": transport, "tokens": tokens, "blocks": order, "MB": nbytes / 1e6, "ms": seconds * 1e3}
        host_us, cpu_us = (statistics.median(each[1:]) / layout.num_layers * 1e6 for each in (calls, costs))
        row |= {"GB/s": nbytes / seconds / 1e9, "host us a layer": host_us, "CPU us a layer": cpu_us}
        answers.put(row | {"connect ms": times[0] * 1e3})
    answers.put(None)
    threading.Event().wait()  # waits until the other side has answered
