"""How an operator's command asks the router."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.cli.terminal.exit_codes import errors_reported
from baton.cli.terminal.options import AddressOption, CaFileOption, OperatorKeyFileOption
from baton.runs.access import Access
from runtime.calls.router import Client

T = TypeVar("T")


@dataclass(frozen=True)
class OperatorsRouter:
    """How an operator's command reaches the service."""

    address: AddressOption = ""  # see runs/places.py
    operator_key_file: OperatorKeyFileOption = None
    ca_file: CaFileOption = None

    def ask(self, timeout_s: float, question: Callable[[Client], Awaitable[T]]) -> T:
        """The answer to `question`, which keeps to `timeout_s`. Without one the command ends with an exit code."""

        async def asked() -> T:
            async with self.access.client(timeout_s) as client:
                return await question(client)

        with errors_reported():
            return asyncio.run(asked())

    @property
    def access(self) -> Access:
        return Access(self.address, None, self.ca_file, self.operator_key_file)
