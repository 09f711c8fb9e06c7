"""Fields of several dialects that ask to keep a prompt cached."""

from msgspec import Struct

from router.api.wishes.cache_hints import CACHE_TTLS_S, retention_s
from router.api.wishes.names import Name


class CacheOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Name | None = None  # hints are for whole prompts in either mode
    ttl: Name | None = None

    def keep_s(self) -> float:
        """Raises InvalidRequestError."""
        return retention_s("prompt_cache_options.ttl", self.ttl, CACHE_TTLS_S)


class CacheControl(Struct, frozen=True, kw_only=True):
    """Anthropic's mark: the prompt up to here shall stay cached. Our hints are for whole prompts. What agents say in it
    beside, such as `scope`, is about whom the cache serves, which a cache_salt says here; it has no effect."""

    type: Name = "ephemeral"
    ttl: Name | None = None
