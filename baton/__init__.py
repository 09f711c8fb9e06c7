"""The face: what a user touches. Commands, the service they start and watch, clients of it, tools on the KV event
stream, and the engine in the user's own process."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.client.async_client import AsyncClient
    from baton.client.sync_client import Client
    from baton.llm import LLM, Output, SamplingParams

__all__ = ["LLM", "AsyncClient", "Client", "Output", "SamplingParams"]

_PLACES = {
    "AsyncClient": "baton.client.async_client",
    "Client": "baton.client.sync_client",
    **dict.fromkeys(("LLM", "Output", "SamplingParams"), "baton.llm"),
}
"""Name -> module. What is imported with first use alone, because commands need none of it."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
