"""The LoRA adapters of one vLLM, by the names that requests have for them. vLLM has each of them checked and loaded
before a request may name it; which ones lie on the device is its own affair."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from runtime.errors import ModelError, UnavailableError

NOT_ENABLED: Final = "this vLLM was started without adapters: `vllm: {enable_lora: true}`"


class VllmAdapters:
    """Implements `engine.interface.Adapters`. Event loop only."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._requests: dict[str, Any] = {}  # vLLM's LoRARequest, by name
        self._folders: dict[str, str] = {}
        self._ids = itertools.count(1)
        self._loads: Counter[str] = Counter()  # of each folder

    @property
    def names(self) -> Sequence[str]:
        return list(self._requests)

    @property
    def places(self) -> int:
        return int(getattr(getattr(self._llm.vllm_config, "lora_config", None), "max_loras", 0))

    def request(self, name: str) -> Any:
        """What a request for the adapter goes to vLLM with; None for no name. Raises KeyError."""
        return self._requests[name] if name else None

    def folder(self, name: str) -> str:
        return self._folders[name]

    async def load(self, name: str, folder: str) -> None:
        if name in self._requests:
            raise UnavailableError(f"it has an adapter {name!r} already: unload that one first")
        if not self.places:
            raise UnavailableError(NOT_ENABLED)
        # vLLM finds prefixes by an adapter's name and path. What a folder has now may differ from what it had before.
        path = folder + "/." * self._loads[folder]
        self._loads[folder] += 1
        try:
            from vllm.lora.request import LoRARequest

            wanted = LoRARequest(lora_name=name, lora_int_id=next(self._ids), lora_path=path)
            await self._llm.engine_core.add_lora_async(wanted)
        except Exception as error:  # vLLM raises the text of what its core raised
            raise ModelError(name, f"vLLM cannot load {folder}: {error}") from error
        self._requests[name], self._folders[name] = wanted, folder

    async def unload(self, name: str) -> None:
        """Requests under way end as they began. vLLM drops the adapter when others need its place."""
        if self._requests.pop(name, None) is None:
            raise UnavailableError(f"it has no adapter {name!r}")
