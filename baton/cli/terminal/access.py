"""How commands reach the router: its address, the key that they show, and the CA of its certificate."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grpc

from baton.cli.terminal.service import reach, router_address
from baton.runs.run_file import find_operator_key, run_at
from runtime.calls.router import Client
from runtime.errors import ConfigError
from runtime.security.callers import parse_callers, read_callers
from runtime.security.keys import API_KEY_VARIABLE
from runtime.security.secret import Secret, read_secrets
from runtime.security.tls import client_context, tls_problem

API_KEY_FLAG = "--api-key-file"
OPERATOR_KEY_FLAG = "--operator-key-file"
CA_FLAG = "--ca-file"
REACH_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Access:
    """`address`: as router_address takes it. `api_key_file` None: the variable BATON_API_KEY, if it is set. `ca_file`
    None: no TLS. `operator_key_file` None: the variable BATON_OPERATOR_KEY, or the key of a run at that address."""

    address: str
    api_key_file: Path | None = None
    ca_file: Path | None = None
    operator_key_file: Path | None = None

    @cached_property
    def place(self) -> str:
        """HOST:PORT. Raises ConfigError, UnavailableError."""
        return router_address(self.address)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Raises ConfigError when a file cannot be used, or when one side speaks TLS and the other does not, and
        UnavailableError when nothing listens there."""
        ca = self._ca()
        operator_key = await asyncio.to_thread(self._operator_key)
        async with Client(self.place, self._api_key(), ca, operator_key=operator_key) as client:
            await reach(self.place, REACH_TIMEOUT_S, f"no router answers at {self.place}", "--address")
            try:
                yield client
            except grpc.aio.AioRpcError as error:
                await self.check_tls(error)
                raise

    async def check_tls(self, error: grpc.aio.AioRpcError) -> None:
        """Raises ConfigError when a call has failed because of TLS: one side lacks it, or does not trust the other."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            ca = self._ca()
            trusting = None if ca is None else client_context(ca, CA_FLAG, self.ca_file)
            problem = await asyncio.to_thread(tls_problem, self.place, trusting)
            if problem:
                raise ConfigError(CA_FLAG, problem) from error

    def _api_key(self) -> Secret | None:
        if self.api_key_file is not None:
            return read_callers(str(self.api_key_file), API_KEY_FLAG)[0][0]
        key = os.environ.get(API_KEY_VARIABLE)
        return parse_callers(key, API_KEY_VARIABLE)[0][0] if key else None

    def _operator_key(self) -> Secret | None:
        if self.operator_key_file is not None:
            return read_secrets(str(self.operator_key_file), OPERATOR_KEY_FLAG)[0]
        return find_operator_key(run_at(self.place))

    def _ca(self) -> bytes | None:
        if self.ca_file is None:
            return None
        try:
            ca = self.ca_file.read_bytes()
        except OSError as error:
            raise ConfigError(CA_FLAG, f"{self.ca_file}: {error.strerror or error}") from error
        client_context(ca, CA_FLAG, self.ca_file)
        return ca
