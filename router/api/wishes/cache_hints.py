"""Hints to keep a prompt cached, or not to: each vendor's spelling, and the one object that all of them become.

Hints are for whole prompts. The longest time that a request asks for counts.
"""

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from baton_proto.worker import CacheHint
from router.api.wishes.names import Name
from runtime.errors import InvalidRequestError, shown

MAX_KEEP_S = 3600  # longer hints count as this; a quarter of a worker's blocks is kept at most, whoever asks

RETENTIONS_S: Mapping[str | None, float] = {None: 0.0, "in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
"""OpenAI's prompt_cache_retention -> seconds."""

SESSION_KEEP_S = 300.0
"""What a `prompt_cache_key` asks for: its session is likely to go on from the prompt. Its value is not read, because
prefixes themselves say which requests belong together."""

TTLS_S: Mapping[str | None, float] = {None: 300.0, "5m": 300.0, "1h": 3600.0}
"""Anthropic's `ttl` of a cache_control -> seconds."""

CACHE_TTLS_S: Mapping[str | None, float] = {None: 0.0, "30m": 1800.0, "12h": 43200.0}
"""OpenAI's `ttl` of prompt_cache_options -> seconds."""


class CacheControl(Struct, frozen=True, kw_only=True):
    """Anthropic's mark: the prompt up to here shall stay cached. Agents add fields such as `scope`, which say whom the
    cache serves; a cache_salt says that here, and these fields have no effect."""

    type: Name = "ephemeral"
    ttl: Name | None = None

    def keep_s(self, where: str) -> float:
        """Raises InvalidRequestError."""
        return _seconds(f"{where}.ttl", self.ttl, TTLS_S)


class CacheOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's prompt_cache_options."""

    mode: Name | None = None  # without effect
    ttl: Name | None = None


class CacheFields(Struct, frozen=True, kw_only=True):
    """Our own fields."""

    keep_cache_s: float | None = None
    drop_cache: bool | None = None

    def keeps_s(self) -> Iterable[float]:
        """The seconds that a vendor's fields ask for. Raises InvalidRequestError."""
        return ()

    def hint(self) -> CacheHint:
        """Raises InvalidRequestError."""
        return cache_hint(self.keep_cache_s, self.drop_cache, *self.keeps_s())


def cache_hint(keep_cache_s: float | None, drop_cache: bool | None, *others_s: float) -> CacheHint:
    """`others_s`: what a vendor's fields ask for. Raises InvalidRequestError."""
    own_s = keep_cache_s or 0.0
    if not 0 <= own_s < math.inf:
        raise InvalidRequestError("keep_cache_s", f"is {own_s}, must be 0 or more seconds")
    keep_s = math.ceil(min(MAX_KEEP_S, max((own_s, *others_s))))
    if keep_s and drop_cache:
        problem = "contradicts keep_cache_s, and what else asks to keep the prompt: leave one of them out"
        raise InvalidRequestError("drop_cache", problem)
    return CacheHint(keep_s, bool(drop_cache))


def openai_keeps_s(retention: str | None, key: str | None, options: CacheOptions | None = None) -> Iterable[float]:
    """The seconds that OpenAI's prompt_cache_... fields ask for. Raises InvalidRequestError."""
    yield _seconds("prompt_cache_retention", retention, RETENTIONS_S)
    yield SESSION_KEEP_S if key else 0.0
    if options is not None:
        yield _seconds("prompt_cache_options.ttl", options.ttl, CACHE_TTLS_S)


def _seconds(where: str, name: str | None, known: Mapping[str | None, float]) -> float:
    if name not in known:
        raise InvalidRequestError(where, f"is {shown(name)}, must be one of {', '.join(filter(None, known))}")
    return known[name]
