"""How commands reach the router: its address, the API key, and the CA of its certificate."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from runtime.calls.router import Client
from runtime.errors import ConfigError
from runtime.security.keys import API_KEY_VARIABLE
from runtime.security.secret import Secret, parse_secrets, read_secrets
from runtime.security.tls import client_context, tls_problem

API_KEY_FLAG = "--api-key-file"
CA_FLAG = "--ca-file"


@dataclass(frozen=True, slots=True)
class Access:
    """`api_key_file` None: the variable BATON_API_KEY, if it is set. `ca_file` None: no TLS."""

    address: str
    api_key_file: Path | None = None
    ca_file: Path | None = None

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Raises ConfigError when a file cannot be used, or when one side speaks TLS and the other does not."""
        async with Client(self.address, self._api_key(), self._ca()) as client:
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
            problem = await asyncio.to_thread(tls_problem, self.address, trusting)
            if problem:
                raise ConfigError(CA_FLAG, problem) from error

    def _api_key(self) -> Secret | None:
        if self.api_key_file is not None:
            return read_secrets(str(self.api_key_file), API_KEY_FLAG)[0]
        key = os.environ.get(API_KEY_VARIABLE)
        return parse_secrets(key, API_KEY_VARIABLE)[0] if key else None

    def _ca(self) -> bytes | None:
        if self.ca_file is None:
            return None
        try:
            ca = self.ca_file.read_bytes()
        except OSError as error:
            raise ConfigError(CA_FLAG, f"{self.ca_file}: {error.strerror or error}") from error
        client_context(ca, CA_FLAG, self.ca_file)
        return ca
