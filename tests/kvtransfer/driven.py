"""A decode and a prefill worker's end of transfers in child processes (slab_process.py), and what tests ask of them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.kvtransfer.peers import PeerProcess, child
from tests.kvtransfer.slab_process import LAYOUT

FREED_WITHIN_S = 2.0
NUM_GPUS = torch.cuda.device_count()
DECODE_GPU = 1 if NUM_GPUS > 1 else 0  # beside the prefill worker where there is one GPU alone


def on_gpus(transport: str) -> list[pytest.MarkDecorator]:
    """Marks of a test whose two ends have their slabs on GPUs: one GPU is enough, but NCCL takes none twice."""
    need = 2 if transport == "nccl" else 1
    reason = "needs two NVIDIA GPUs" if need == 2 else "needs an NVIDIA GPU"
    return [pytest.mark.gpu, pytest.mark.skipif(need > NUM_GPUS, reason=reason)]


class Decode:
    def __init__(self, process: PeerProcess) -> None:
        self.process = process

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.process.tell(do=do, **fields)
        return self.process.hear()

    def reserve(self, blocks: list[int], ttl_s: float | None = None) -> dict[str, Any]:
        grant: dict[str, Any] = self.ask("reserve", blocks=blocks, ttl_s=ttl_s)["grant"]
        return grant

    def has(self, kind: str, grant: dict[str, Any], timeout_s: float = 60.0) -> bool:
        return bool(self.ask("await", kind=kind, transfer_id=grant["transfer_id"], timeout_s=timeout_s)["came"])

    def digest(self, blocks: list[int]) -> str:
        return str(self.ask("digest", blocks=blocks)["digest"])

    def cancel(self, grant: dict[str, Any]) -> None:
        self.ask("cancel", transfer_id=grant["transfer_id"])

    def is_well_and_empty(self) -> bool:
        return self.ask("state") == {"leases": 0, "problems": [], "computes": True}


class Prefill:
    def __init__(self, process: PeerProcess) -> None:
        self.process = process

    def begin(self, grant: dict[str, Any], source: list[int], *, whole: bool = False, reuse: bool = False) -> None:
        """The source's blocks, from the grant's first on; `whole`: and no more will come. `reuse`: all blocks are
        written to as soon as the sender has no use for them."""
        self.process.tell(do="push", grant=grant, source=source, whole=whole, reuse=reuse, first=0)

    def go_on(self, grant: dict[str, Any], source: list[int], first: int) -> None:
        """The rest, from the grant's block `first` on."""
        self.process.tell(do="push", grant=grant, source=source, whole=True, reuse=False, first=first)

    def abort(self, grant: dict[str, Any]) -> None:
        self.process.tell(do="abort", transfer_id=grant["transfer_id"])

    def prompt(self, num_blocks: int) -> list[int]:
        """The blocks of a prompt that an engine there has computed and keeps."""
        self.process.tell(do="prompt", num_blocks=num_blocks)
        source: list[int] = self.process.hear()["source"]
        return source

    def crowd(self) -> int:
        """The engine there preempts sequences; how many."""
        self.process.tell(do="crowd")
        return int(self.process.hear()["preemptions"])

    def end(self) -> dict[str, Any]:
        return self.process.hear()

    def push(self, grant: dict[str, Any], source: list[int]) -> dict[str, Any]:
        self.begin(grant, source, whole=True)
        return self.end()

    def digest(self, blocks: list[int]) -> str:
        self.process.tell(do="digest", blocks=blocks)
        return str(self.process.hear()["digest"])

    def computes(self) -> bool:
        self.process.tell(do="state")
        return self.process.hear() == {"computes": True}


@contextmanager
def decode_worker(transport: str, settings: dict[str, Any] | None = None, **config: Any) -> Iterator[Decode]:
    """On a GPU, unless `settings` say `gpu: None`."""
    given = {"gpu": DECODE_GPU, "seed": 1, "config": {"transport": transport, **config}, **(settings or {})}
    with child("slab-decode", **given) as process:
        yield Decode(process)


@contextmanager
def prefill_worker(transport: str, settings: dict[str, Any] | None = None, **config: Any) -> Iterator[Prefill]:
    given = {"gpu": 0, "seed": 2, "config": {"transport": transport, **config}, **(settings or {})}
    with child("slab-prefill", **given) as process:
        yield Prefill(process)


def any_blocks(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(LAYOUT.num_blocks), count)


def arrive(prefill: Prefill, decode: Decode, seed: int, count: int = 300) -> None:
    """A transfer of random blocks ends well, and what arrived is what was sent."""
    source, destination = any_blocks(count, seed), any_blocks(count, seed + 1)
    grant = decode.reserve(destination)
    assert prefill.push(grant, source)["ok"]
    assert decode.has("Committed", grant)
    assert decode.ask("digest", blocks=destination)["digest"] == prefill.digest(source)
