"""The handoffs of a worker whose engine takes no KV from others: there are none."""

from typing import Any

from decode_worker.request import Phase, Request


class NoHandoffs:
    """Has what a decode worker asks of Handoffs, of its receiver and of its reservations."""

    endpoint = None
    problem = ""

    def __init__(self) -> None:
        self.receiver = self.reservations = self

    def start(self, request: Request) -> None:
        raise AssertionError("its prompts run here")

    def abandon(self, request: Request, phase: Phase, reason: str) -> None:
        """Nothing is under way elsewhere."""

    def retry(self) -> None:
        """Nobody waits for blocks."""

    def lease_count(self) -> int:
        return 0

    def check_integrity(self) -> list[str]:
        return []

    def suspend(self, timeout_s: float) -> None:
        """No peer writes here."""

    def identify(self, identity: Any) -> None:
        """No peer asks."""

    def resume(self) -> None: ...

    async def close(self) -> None: ...
