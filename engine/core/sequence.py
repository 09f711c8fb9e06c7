"""One request inside an engine: its tokens, its blocks, and how far it is computed.

A sequence is mutable and owned by the engine thread. The scheduler moves it between states, the block manager fills its
block table, the engine appends its tokens; workers create and read it.
"""

import enum
from array import array

import numpy as np

from baton_proto.sampling import Needs, SamplingParams
from runtime.blocks.block_hash import block_hashes, sequence_hashes

PENDING = -1
"""A token in token_ids that a step on its way samples, so the host does not know it yet."""


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    REMOTE = "remote"  # holds blocks for its whole prompt, which a prefill worker computes
    RUNNING = "running"  # holds blocks; prefills or decodes here
    FINISHED = "finished"  # holds no blocks, unless it is pinned


class Sequence:
    """Prompt and output of one request, and the KV blocks that hold them.

    A `prefill_only` sequence ends after the one token that its prompt yields. If it is `pinned`, it keeps its blocks
    after its end, because somebody still reads them, until the owner calls `Engine.unpin`.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "needs",
        "num_cached_tokens",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prefill_tokens",
        "num_prompt_tokens",
        "pinned",
        "prefill_only",
        "priority",
        "request_id",
        "retired_blocks",
        "sampling",
        "sequence_hashes",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        prefill_only: bool = False,
        pinned: bool = False,
    ) -> None:
        assert 0 < num_prompt_tokens <= len(token_ids)
        assert prefill_only or not pinned, "only a prefill-only sequence has readers of its blocks"
        self.request_id = request_id
        self.token_ids = token_ids  # prompt + output; replayed output is there from the start; see PENDING
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.needs = sampling.needs  # kept, because every step asks for it
        self.priority = priority  # higher runs first
        self.prefill_only = prefill_only
        self.pinned = pinned
        self.status = SequenceStatus.WAITING
        self.arrival: int | None = None  # its place in the engine's order of arrival
        self.num_prefill_tokens = 0  # tokens that this engine runs as prompt chunks before it decodes
        self.num_computed_tokens = 0  # tokens whose KV is in the slab
        self.num_in_flight_tokens = 0  # tokens whose KV the steps on their way write
        self.num_pending_tokens = 0  # tokens that those steps sample: the last ones of token_ids
        self.num_cached_tokens = 0  # the prefix hit of its first allocation
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.retired_blocks: list[int] = []  # replaced by canonical ones, but still read
        self.num_committed_blocks = 0  # leading blocks of the table that are in the prefix cache
        self.block_hashes: list[int] = []  # of leading full blocks, as far as they were needed
        self.sequence_hashes: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Also the output position of the next token, which its noise depends on."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that are computed or on their way; the next step begins after them."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled_tokens < self.num_prefill_tokens

    @property
    def awaits_token(self) -> bool:
        """Whether the pending token must be known before the next step, because it is the last or sampling reads it."""
        if not self.num_pending_tokens:
            return False
        return self.prefill_only or self.num_output_tokens >= self.sampling.max_tokens or self.needs is Needs.TOKENS

    @property
    def order(self) -> tuple[int, int]:
        """The smallest runs first and is preempted last: higher priority, then earlier arrival."""
        assert self.arrival is not None
        return (-self.priority, self.arrival)

    def hash_blocks(self, num_blocks: int, block_size: int) -> None:
        """Extends both hash lists to the first `num_blocks` blocks, which must be full. A block is hashed once."""
        known = len(self.block_hashes)
        if num_blocks <= known:
            return
        tokens = np.frombuffer(
            array("I", self.token_ids[known * block_size : num_blocks * block_size]), dtype=np.uint32
        )
        assert len(tokens) == (num_blocks - known) * block_size
        new = block_hashes(tokens, block_size)
        parent = self.sequence_hashes[-1] if known else None
        self.block_hashes.extend(new.tolist())
        self.sequence_hashes.extend(sequence_hashes(new, parent).tolist())

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self.status.value} "
            f"computed {self.num_computed_tokens}/{self.num_tokens} blocks {len(self.block_table)}>"
        )
