"""vLLM's prefix cache as worker/ sees it: its events, its table, and nothing of the tiers that our own engine has."""

from collections.abc import Callable

from baton_proto.kv_events import DEFAULT_HASH_SEED, KvEvent, Stored
from engine.sequences.sequence import Sequence
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
    """Event loop only. The numbers below are zero because vLLM has no such tier, or does not tell."""

    num_kept = 0
    num_raised = 0
    num_moved_down = 0
    num_read = 0
    num_disk_errors = 0
    num_collisions = 0

    def __init__(self, block_size: int, num_blocks: int) -> None:
        super().__init__(block_size, seed_of)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_used = 0  # as of the last step

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence needs and that a prefix may be found in, as far as the events tell."""
        return max(0, min(self.num_blocks - self.num_used, self.blocks.num_shown - self.num_used))

    def take_events(self) -> list[KvEvent]:
        """None: they are published when they arrive."""
        return []

    def runs(self) -> list[Stored]:
        """The whole table, as far as it was told."""
        return self.blocks.runs()

    def clear(self) -> None:
        """Nothing here: vLLM empties its cache as it falls asleep, when no block is in use (see VllmMemory)."""

    check_unused = vacate = clear

    def flush(self) -> bool:
        """False: there is nothing to write."""
        return False

    def restores(self, sequence: Sequence) -> bool:
        """True of any that waits for blocks: vLLM has been asked, and may be asked for others meanwhile."""
        return True

    def on_copied(self, wake: Callable[[], object]) -> None:
        """There are no tiers to copy between."""
