"""The models that a server names: the one that it was started with, and LoRA adapters, whoever has loaded them."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from engine.vllm.server.server import RefusedError, VllmServer
from runtime.errors import UnavailableError

PATH: Final = "/v1/models"
WAY_OUT: Final = "start it with --lora-modules, or with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"


class Model(Struct):
    id: str = ""
    max_model_len: int | None = None  # an adapter tells none, but names its `parent`
    parent: str | None = None
    root: Any = None  # the model as it was started with, as text


class _Models(Struct):
    data: list[Model]


async def models_of(server: VllmServer) -> list[Model]:
    """Raises UnavailableError, RefusedError and msgspec.DecodeError."""
    return msgspec.json.decode(await server.ask(PATH), type=_Models).data


class ServerAdapters:
    """Implements `engine.interface.Adapters`. Event loop only."""

    places = 0  # no server tells

    def __init__(self, server: VllmServer) -> None:
        self.names: Sequence[str] = ()  # as of the last look
        self._server = server
        self._lock = asyncio.Lock()
        self._folders: dict[str, str] = {}  # of those that we have had loaded

    async def look(self) -> None:
        """Raises as models_of."""
        self.names = [model.id for model in await models_of(self._server) if model.parent]

    def folder(self, name: str) -> str:
        return self._folders.get(name, "")

    async def load(self, name: str, folder: str) -> None:
        """`folder`: on the server's machine. What was loaded for the worker of another rank is there for all."""
        async with self._lock:
            if name not in self.names or self._folders.get(name) != folder:
                await self._ask("load", {"lora_name": name, "lora_path": folder})
                self._folders[name] = folder

    async def unload(self, name: str) -> None:
        async with self._lock:
            if name in self.names or self._folders.pop(name, None) is None:
                await self._ask("unload", {"lora_name": name})

    async def _ask(self, verb: str, question: dict[str, str]) -> None:
        try:
            await self._server.ask(f"/v1/{verb}_lora_adapter", question, is_patient=True)
            await self.look()
        except (RefusedError, msgspec.DecodeError) as error:
            remedy = f" ({WAY_OUT})" if isinstance(error, RefusedError) and error.status == 404 else ""
            raise UnavailableError(f"the server does not {verb} {question['lora_name']}: {error}{remedy}") from error
