"""A client's way to a service's router: address, keys, and the CA of the certificate."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grpc

from baton.runs.call_errors import error_of
from baton.runs.places import reach, router_address
from baton.runs.run_file import find_operator_key, run_at
from runtime.calls.router import Client
from runtime.errors import BatonError, ConfigError
from runtime.security.callers import parse_callers, read_callers
from runtime.security.keys import API_KEY_VARIABLE
from runtime.security.secret import Secret, read_secrets
from runtime.security.tls import client_context, tls_problem

ADDRESS_FLAG = "--address or BATON_ADDRESS"
API_KEY_FLAG = "--api-key-file"
OPERATOR_KEY_FLAG = "--operator-key-file"
CA_FLAG = "--ca-file"
REACH_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Access:
    """`address`: as router_address takes it. A key is given as such, or in a file. Without an API key: that of the
    variable BATON_API_KEY, if it is set; without an operator key: that of BATON_OPERATOR_KEY, or of a run at that
    address. `ca_file` None: no TLS."""

    address: str
    api_key_file: Path | None = None
    ca_file: Path | None = None
    operator_key_file: Path | None = None
    api_key: Secret | None = None
    operator_key: Secret | None = None

    @cached_property
    def place(self) -> str:
        """HOST:PORT. Raises ConfigError, UnavailableError."""
        return router_address(self.address)

    async def connect(self) -> Client:
        """Raises ConfigError when a file cannot be used, UnavailableError when nothing listens there."""
        ca, api_key = self._ca(), self.users_key()
        operator_key = await asyncio.to_thread(self.operators_key)
        await reach(self.place, REACH_TIMEOUT_S, f"no router answers at {self.place}", ADDRESS_FLAG)
        return Client(self.place, api_key, ca, operator_key=operator_key)

    @asynccontextmanager
    async def client(self, timeout_s: float | None = None) -> AsyncIterator[Client]:
        """Raises as `connect` does, and what failed calls mean, whose deadline is `timeout_s`."""
        async with await self.connect() as client:
            try:
                yield client
            except grpc.aio.AioRpcError as error:
                raise await self.meaning(error, timeout_s) from error

    async def meaning(self, error: grpc.aio.AioRpcError, timeout_s: float | None = None) -> BatonError:
        """Converts the error of a call whose deadline was `timeout_s`. The result is a ConfigError when one side of the
        connection lacks TLS, or does not trust the other."""
        unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
        if unavailable and (problem := await asyncio.to_thread(tls_problem, self.place, self.trust())):
            return ConfigError(CA_FLAG, problem)
        return error_of(error, self.place, timeout_s)

    def trust(self) -> ssl.SSLContext | None:
        """The context of a TLS client with our CA. Raises ConfigError."""
        ca = self._ca()
        return None if ca is None else client_context(ca, CA_FLAG, self.ca_file)

    def users_key(self) -> Secret | None:
        """The API key that we show. Raises ConfigError."""
        if self.api_key is not None:
            return self.api_key
        if self.api_key_file is not None:
            return read_callers(str(self.api_key_file), API_KEY_FLAG)[0][0]
        key = os.environ.get(API_KEY_VARIABLE)
        return parse_callers(key, API_KEY_VARIABLE)[0][0] if key else None

    def operators_key(self) -> Secret | None:
        """The operator key that we show. Raises ConfigError, UnavailableError."""
        if self.operator_key is not None:
            return self.operator_key
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
