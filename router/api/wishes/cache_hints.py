"""For how long a prompt shall stay cached, as fields of several vendors ask for it."""

from collections.abc import Mapping

from runtime.errors import InvalidRequestError, shown

RETENTIONS_S: Mapping[str | None, float] = {None: 0.0, "in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
"""OpenAI's prompt_cache_retention -> for how long the prompt shall stay cached."""

SESSION_KEEP_S = 300.0
"""For how long a prompt with a `prompt_cache_key` shall stay cached: its session is likely to go on from it."""

TTLS_S: Mapping[str | None, float] = {None: 300.0, "5m": 300.0, "1h": 3600.0}
"""Anthropic's `ttl` of a cache_control -> the same."""

CACHE_TTLS_S: Mapping[str | None, float] = {None: 0.0, "30m": 1800.0, "12h": 43200.0}
"""OpenAI's `ttl` of prompt_cache_options -> the same."""


def retention_s(where: str, name: str | None, known: Mapping[str | None, float]) -> float:
    """Raises InvalidRequestError."""
    if name not in known:
        raise InvalidRequestError(where, f"is {shown(name)}, must be one of {', '.join(filter(None, known))}")
    return known[name]


def session_keep_s(key: str | None) -> float:
    """Of a prompt_cache_key. Prefixes themselves say which requests belong together, so its value is not read."""
    return SESSION_KEEP_S if key else 0.0


def longest_keep_s(keep_cache_s: float | None, *others: float) -> float:
    """For how long the prompt shall stay cached; `others`: as other fields ask for it. A `keep_cache_s` that is below
    0, or NaN, goes before them, for `validate` to refuse."""
    own_s = keep_cache_s or 0.0
    return max((own_s, *others)) if own_s >= 0 else own_s
