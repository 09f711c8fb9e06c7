"""Either end of KV transfers with its slab on a GPU, in a process of its own (tests/kvtransfer/peer_process.py)."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from baton_proto.worker import Grant
from kvtransfer.decode_side.events import TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.serving import LoggingConfig, TransferConfig
from runtime.telemetry.logging import configure_logging

LAYOUT = SlabLayout(num_layers=4, num_blocks=1024, num_kv_heads=8, block_size=64, head_dim=128, dtype="bfloat16")
EVENT_TIMEOUT_S = 20.0

Say = Callable[..., None]


class GpuSlab:
    """The process's GPU is the one that it is told; CUDA is looked at no earlier."""

    def __init__(self, settings: dict[str, Any]) -> None:
        configure_logging(LoggingConfig(), "gpu")
        os.environ["CUDA_VISIBLE_DEVICES"] = str(settings["gpu"])
        import torch

        from runtime.device.drivers import memory_of

        torch.manual_seed(settings.get("seed", 0))
        torch.cuda.set_device(0)
        if "at_split" in settings:
            end_at_split(settings["at_split"])
        self.slab = Slab(LAYOUT, memory_of(torch.device("cuda")))
        self.fill()

    def fill(self) -> None:
        """Every bit at random: compared as bytes, NaN is like any other value."""
        import torch

        words = self.slab.tensor.flatten().view(torch.int64)
        words.copy_(torch.randint(-(2**63), 2**63 - 1, words.shape, device="cuda"))

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


def gpu_prefill(settings: dict[str, Any], commands: Iterable[dict[str, Any]], say: Say) -> None:
    ours = GpuSlab(settings)
    config = msgspec.convert(settings["config"], TransferConfig)
    sender = Sender(ours.slab, SlabIdentity("prefill", 1, "model", LAYOUT), config)
    say(ready=True)

    def tell_end(transfer_id: str, result: PushResult) -> None:
        say(done=transfer_id, ok=result.ok, reason=result.reason, transport=result.transport)

    for command in commands:
        match command["do"]:
            case "push":  # a chunk, and `whole`: that is all
                grant = msgspec.convert(command["grant"], Grant)
                name = grant.transfer_id
                push = sender.begin(grant, lambda result, name=name: tell_end(name, result))  # type: ignore[misc]
                for layer in range(LAYOUT.num_layers):
                    push.layer_ready(layer, 0, command["source"], ours.slab.mark())
                if command["whole"]:
                    push.commit(b"first token")
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


def gpu_decode(settings: dict[str, Any], commands: Iterable[dict[str, Any]], say: Say) -> None:
    ours, events = GpuSlab(settings), Events()
    config = msgspec.convert(settings["config"], TransferConfig)
    receiver = Receiver(ours.slab, SlabIdentity("decode", 1, "model", LAYOUT), config, "127.0.0.1", events.add)
    say(ready=True)
    for command in commands:
        match command["do"]:
            case "reserve":
                grant = receiver.reserve(command["blocks"], 0, command.get("ttl_s"))
                say(grant=msgspec.to_builtins(grant))
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
