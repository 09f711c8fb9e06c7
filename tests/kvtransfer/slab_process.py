"""Either end of KV transfers with its slab on a GPU or in host memory, in a process of its own (peer_process.py)."""

import dataclasses
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import numpy as np

from baton_proto.worker import Grant
from engine.vllm.kv.cache_memory import VllmSlab
from engine.vllm.kv.messages import CacheMemory
from kvtransfer.decode_side.events import TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.push import Push, PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.surroundings import LoggingConfig
from runtime.device.host_memory import HostMemory
from runtime.device.memory_range import MemoryRange
from runtime.telemetry.logging import configure_logging
from tests.kvtransfer.crowded_engine import CrowdedEngine
from tests.kvtransfer.peers import PatientConfig

LAYOUT = SlabLayout(num_layers=4, num_blocks=1024, num_kv_heads=8, block_size=64, head_dim=128, dtype="bfloat16")
HOST_LAYOUT = SlabLayout(num_layers=4, num_blocks=1024, num_kv_heads=2, block_size=16, head_dim=64, dtype="bfloat16")
EVENT_TIMEOUT_S = 60.0

Say = Callable[..., None]


class HostSlab:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._random = np.random.default_rng(settings.get("seed", 0))
        self.slab = Slab(HOST_LAYOUT) if settings["memory"] == "host" else cache_of_vllm()
        assert "torch" not in sys.modules, "memory of the host needs no torch, whose import takes seconds"
        self._words = np.frombuffer(self.slab.buffer, np.uint64).reshape(*HOST_LAYOUT.shape[:2], -1)
        self.fill()

    def fill(self) -> None:
        """Every bit at random."""
        self._words[:] = self._random.integers(0, 2**64, self._words.shape, np.uint64)

    def fill_block(self, block: int) -> None:
        self._words[:, block] = self._random.integers(0, 2**64, self._words.shape[-1], np.uint64)

    def digest(self, blocks: Sequence[int]) -> str:
        """Of these blocks in their order, all layers."""
        return hashlib.blake2b(self._words[:, list(blocks)].tobytes()).hexdigest()

    def computes(self) -> bool:
        return True


def cache_of_vllm(layout: SlabLayout = HOST_LAYOUT) -> Slab:
    """As a worker process maps it; here no vLLM computes on it."""
    memory = MemoryRange(HostMemory(), layout.nbytes)
    numbers = (layout.num_layers, layout.num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
    fd = memory.export()
    try:
        return cast(Slab, VllmSlab(CacheMemory(*numbers, layout.dtype, "form"), fd))
    finally:
        os.close(fd)


class GpuSlab:
    """The process's GPU is the one that it is told; CUDA is looked at no earlier."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(settings["gpu"])
        import torch

        from runtime.device.drivers import memory_of

        torch.manual_seed(settings.get("seed", 0))
        torch.cuda.set_device(0)
        if "at_split" in settings:
            end_at_split(settings["at_split"])
        layout = dataclasses.replace(LAYOUT, num_blocks=settings.get("num_blocks", LAYOUT.num_blocks))
        self.slab = Slab(layout, memory_of(torch.device("cuda")))
        self._words = self.slab.tensor.flatten(2).view(torch.int64)
        self.fill()

    def fill(self) -> None:
        """Every bit of LAYOUT's blocks at random: compared as bytes, NaN is like any other value."""
        self._randomize(slice(LAYOUT.num_blocks))

    def fill_block(self, block: int) -> None:
        self._randomize(slice(block, block + 1))

    def _randomize(self, blocks: slice) -> None:
        import torch

        words = self._words[:, blocks]
        words.copy_(torch.randint(-(2**63), 2**63 - 1, words.shape, device="cuda"))
        torch.cuda.synchronize()

    def digest(self, blocks: Sequence[int]) -> str:
        """Of these blocks in their order, all layers."""
        import torch

        values = self.slab.tensor[:, list(blocks)].contiguous().view(torch.uint8)
        return hashlib.blake2b(values.cpu().numpy().data).hexdigest()

    def computes(self) -> bool:
        """Whether CUDA has no error to report."""
        import torch

        torch.cuda.synchronize()
        return bool((torch.ones(1000, device="cuda") + 1).sum().item() == 2000)


def end_at_split(signal_number: int) -> None:
    """The process gets that signal when it has met its peer in NCCL and is about to split their communicator."""
    from nccl import core

    def split(*_arguments: Any, **_options: Any) -> None:
        os.kill(os.getpid(), signal_number)

    core.Communicator.split = split


def slab_of(settings: dict[str, Any]) -> HostSlab | GpuSlab:
    configure_logging(LoggingConfig(), "slab")
    return HostSlab(settings) if settings.get("memory") else GpuSlab(settings)


def slab_prefill(settings: dict[str, Any], commands: Iterable[dict[str, Any]], say: Say) -> None:
    ours = slab_of(settings)
    config = msgspec.convert(settings["config"], PatientConfig)
    sender = Sender(ours.slab, SlabIdentity("prefill", 1, "model", ours.slab.layout), config)
    engine = CrowdedEngine(ours)
    pushes: dict[str, Push] = {}
    say(ready=True)

    def tell_end(transfer_id: str, reuse: bool, result: PushResult) -> None:
        if reuse:
            ours.fill()
        say(done=transfer_id, ok=result.ok, reason=result.reason, transport=result.transport)

    for command in commands:
        match command["do"]:
            case "push":  # a chunk, and `whole`: that is all; `reuse`: the slab is written to as soon as the push ends
                grant = msgspec.convert(command["grant"], Grant)
                name = grant.transfer_id
                if name not in pushes or not command["first"]:
                    pushes[name] = sender.begin(grant, functools.partial(tell_end, name, command["reuse"]))
                for layer in range(LAYOUT.num_layers):
                    pushes[name].layer_ready(layer, command["first"], command["source"], ours.slab.mark())
                if command["whole"]:
                    pushes[name].commit(b"first token")
            case "abort":
                pushes[command["transfer_id"]].abort("why not")
            case "prompt":
                say(source=engine.prompt(command["num_blocks"]))
            case "crowd":
                say(preemptions=engine.crowd())
            case "digest":
                say(digest=ours.digest(command["blocks"]))
            case "state":
                say(computes=ours.computes())
    sender.close()


class Events:
    def __init__(self) -> None:
        self._seen: list[TransferEvent] = []
        self._changed = threading.Condition()

    def add(self, event: TransferEvent) -> None:
        with self._changed:
            self._seen.append(event)
            self._changed.notify_all()

    def has(self, kind: str, transfer_id: str, timeout_s: float) -> bool:
        """Waits for it."""

        def seen() -> bool:
            return any(type(event).__name__ == kind and event.transfer_id == transfer_id for event in self._seen)

        with self._changed:
            return self._changed.wait_for(seen, timeout_s)


def slab_decode(settings: dict[str, Any], commands: Iterable[dict[str, Any]], say: Say) -> None:
    ours, events = slab_of(settings), Events()
    config = msgspec.convert(settings["config"], PatientConfig)
    identity = SlabIdentity("decode", settings.get("incarnation", 1), "model", ours.slab.layout)
    receiver = Receiver(ours.slab, identity, config, "127.0.0.1", events.add)
    engine = CrowdedEngine(ours)
    say(ready=True)
    for command in commands:
        match command["do"]:
            case "reserve":
                grant = receiver.reserve(command["blocks"], 0, command.get("ttl_s"))
                say(grant=msgspec.to_builtins(grant))
            case "reserve for a prompt":
                say(grant=msgspec.to_builtins(receiver.reserve(engine.reserve(command["num_blocks"]), 0)))
            case "crowd":
                say(preemptions=engine.crowd())
            case "fill":
                ours.fill()
                say(filled=True)
            case "cancel":
                receiver.cancel(command["transfer_id"], "why not")
                say(cancelled=True)
            case "await":
                timeout_s = command.get("timeout_s", EVENT_TIMEOUT_S)
                say(came=events.has(command["kind"], command["transfer_id"], timeout_s))
            case "digest":
                say(digest=ours.digest(command["blocks"]))
            case "nap":  # a generation ends
                receiver.suspend(EVENT_TIMEOUT_S)
                ours.slab.suspend()
                ours.slab.resume()
                receiver.resume()
                say(awake=True)
            case "state":
                problems = receiver.check_integrity()
                say(leases=receiver.lease_count(), problems=problems, computes=ours.computes())
    receiver.close()
