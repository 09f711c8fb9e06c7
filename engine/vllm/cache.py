"""vLLM's prefix cache, as its events and its numbers tell it."""

from baton_proto.kv_events import DEFAULT_HASH_SEED
from engine.vllm.events.followed_cache import FollowedCache

SALT = "baton-"


def salt_of(hash_seed: int) -> str | None:
    """vLLM's cache salt for the requests of a seed; None: they have none."""
    return None if hash_seed == DEFAULT_HASH_SEED else f"{SALT}{hash_seed}"


def seed_of(salt: object) -> int | None:
    """The seed of a salt of ours; None: it is none."""
    if isinstance(salt, str) and salt.startswith(SALT) and salt[len(SALT) :].isdecimal():
        return int(salt[len(SALT) :])
    return None


class VllmCache(FollowedCache):
    """Event loop only."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, seed_of)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_used = 0  # as of the last step

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence needs and that a prefix may be found in, as far as the events tell."""
        return max(0, min(self.num_blocks - self.num_used, self.blocks.num_shown - self.num_used))
