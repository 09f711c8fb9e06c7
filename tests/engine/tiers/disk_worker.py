"""A worker's engine with a disk tier, and prompts that are more than fits into its memory."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.core.engine import Engine
from engine.sequences.sequence import Sequence
from runtime.config.serving import DiskKvConfig, EngineConfig, ServingConfig
from tests.engine.kv_oracle import make_sequence
from tests.tiny_model import VOCAB_SIZE
from worker.engines.own import build_engine

TIMEOUT_S = 30.0


class Worker:
    """An engine with a small pool, a smaller host tier and a disk tier below, driven as an engine loop drives it.

    What is cached where does not depend on how quick the machine is: the disk has written what it was given before the
    next request comes, reading is always sooner than computing, and no read is late.
    """

    def __init__(
        self,
        model: Path,
        folder: Path | None,
        num_disk: int = 128,
        num_host: int = 32,
        ranks: int = 1,
    ) -> None:
        plain = EngineConfig(device="cpu", threads=1, kv_memory="4MiB")
        probe = build_engine(ServingConfig(model=str(model), engine=plain))
        layout = probe.kv.slab.layout
        one_block = layout.num_layers * layout.block_bytes // ranks
        probe.close()
        engine = replace(plain, kv_memory=str(20 * one_block), tensor_parallel=ranks)
        if folder is not None:
            disk = DiskKvConfig(folder=str(folder), size=str(num_disk * ranks * (one_block + 128)))
            host = str(num_host * one_block)
            engine = replace(engine, host_kv_memory=host, disk_kv=disk)
        self.assembly = build_engine(ServingConfig(model=str(model), engine=engine))
        self.engine: Engine = self.assembly.engine
        self.engine.block_manager.tiers.compute_s = lambda num_tokens: inf
        self.disk_is_done = threading.Event()
        self.engine.block_manager.tiers.on_copied(self.disk_is_done.set)
        self.names = 0

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy answers, one request after the other."""
        return [self.answer(prompt)[1] for prompt in prompts]

    def answer(self, prompt: list[int]) -> tuple[Sequence, list[int]]:
        self.names += 1
        sequence = make_sequence(str(self.names), prompt, max_tokens=6, ignore_eos=True)
        self.engine.add(sequence)
        tokens: list[int] = []
        deadline_s = time.monotonic() + TIMEOUT_S
        while sequence.request_id in self.engine._sequences:
            assert time.monotonic() < deadline_s
            self.disk_is_done.clear()
            output = self.engine.step()
            tokens += [token for one in output.outputs for token in one.token_ids]
            if not output.is_news:
                self.disk_is_done.wait(0.1)
            assert self.engine.check_integrity() == []
        self.until_written()
        return sequence, tokens

    def until_written(self) -> None:
        manager = self.engine.block_manager
        deadline_s = time.monotonic() + TIMEOUT_S
        while manager.cache.copies.writes:
            assert time.monotonic() < deadline_s
            self.disk_is_done.wait(0.1)
            self.disk_is_done.clear()
            self.engine.step()

    def close(self) -> None:
        self.assembly.close()


@contextmanager
def worker(*arguments: object, late_s: float = inf, **options: int) -> Iterator[Worker]:
    """`late_s`: a read that takes longer is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.tiers.disk_kv.LATE_S", late_s)
        patch.setattr("engine.ranks.ranked_disk.LATE_S", late_s)
        one = Worker(*arguments, **options)  # type: ignore[arg-type]
        try:
            yield one
        finally:
            one.close()


def conversations(count: int, seed: int) -> list[list[int]]:
    """Prompts over a few long beginnings, which together are more than fit into memory."""
    dice = random.Random(seed)
    systems = [[random.Random(number).randrange(3, VOCAB_SIZE) for _ in range(150)] for number in range(10)]
    return [dice.choice(systems) + [dice.randrange(3, VOCAB_SIZE) for _ in range(9)] for _ in range(count)]


def prompt(seed: int, length: int = 150) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(3, VOCAB_SIZE) for _ in range(length)]
