"""A service that changes to its next generation and back: a worker with other weights starts beside each worker, which
then drains. Faults strike all of them meanwhile."""

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.service.fleet import POLL_S, Fleet
from tests.chaos.service.member import Kind, Member

USED_WITHIN_S = 20.0  # a worker that faults keep from its routers does not hold up the roll-out for longer
NEXT = "-next"  # ends the name of the folder with the other weights


def models_of(model: str) -> tuple[str, str]:
    """The folders of both generations' weights."""
    return model, model + NEXT


@dataclass(eq=False)
class RollingFleet(Fleet):
    """`generations`: by worker, the index of its weights among `models_of`."""

    generations: dict[str, int] = field(default_factory=dict)
    _generation: int = 0  # that is wanted
    _serial: int = 0  # of names
    _rolling: bool = False
    _nats_url: str = ""

    def complete(self) -> bool:
        return not self._rolling and super().complete()

    def roll(self) -> None:
        """Begins to change to the other generation, if no change is under way."""
        if not self._rolling:
            self._rolling = True
            self._go(self._roll())

    async def _roll(self) -> None:
        self._generation = 1 - self._generation
        try:
            for old in self.of("prefill", "decode"):
                new = self._add_next(old)
                async with self._starts:
                    await self._start(new)
                await self._until_used(new)
                await self._retire(old)
        finally:
            self._rolling = False

    def _add_next(self, old: Member) -> Member:
        self._serial += 1
        name = f"{old.kind}-{self._serial + 10}"
        self._add_python(name, old.kind, self._serial, self._nats_url)
        return self.members[name]

    def _add_python(self, name: str, kind: Kind, place: int, nats_url: str) -> None:
        self._nats_url = nats_url
        super()._add_python(name, kind, place, nats_url)

    async def _until_used(self, new: Member) -> None:
        for _ in range(int(USED_WITHIN_S / POLL_S)):
            if new in self.able(new.kind):
                return
            await asyncio.sleep(POLL_S)

    async def _retire(self, old: Member) -> None:
        """Drains it, whatever strikes it meanwhile."""
        old.retired = True
        while old.name in self.members:
            if old.ready and not old.expected_end:
                old.expected_end = True
                self.lost(old)
                old.signal(signal.SIGTERM)
            await asyncio.sleep(POLL_S)

    def _of_generation(self, name: str) -> dict[str, Any]:
        if name.startswith("router"):
            return {"served_model_name": Path(self.model).name}
        self.generations[name] = self._generation
        model = models_of(self.model)[self._generation]
        engine = {"max_batch_tokens": 96} if self._generation else {}
        return {"served_model_name": Path(self.model).name, "model": model, "engine": engine}

    def decoding(self, generation: int) -> list[str]:
        """The decode workers that there ever were of a generation."""
        return [name for name, kind in self.known.items() if kind == "decode" and self.generations[name] == generation]
