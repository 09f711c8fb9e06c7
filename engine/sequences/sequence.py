"""One request inside an engine: its tokens, its blocks, and how far it is computed.

A sequence is mutable and owned by the engine thread. The scheduler moves it between states, the block manager fills its
block table, the engine appends its tokens; workers create and read it.
"""

import enum
from array import array
from bisect import bisect_left
from collections.abc import Sequence as List
from dataclasses import KW_ONLY, dataclass, field
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from baton_proto.images import Image, Seen
from baton_proto.pooling import Pooling
from baton_proto.sampling import Needs, PromptLogprobs, SamplingParams
from baton_proto.timeline import MAX_CHUNKS
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import NO_HINT, CacheHint
from engine.sequences.moves import Move
from runtime.blocks.block_hash import SEED, block_hashes, lora_seed, sequence_hashes, with_images
from runtime.grammar.matcher import Matcher

PENDING = -1
"""A token in token_ids that a step on its way samples, so the host does not know it yet. Tokens of a draft, which such
a step verifies, are written in as guessed."""


class SequenceStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    REMOTE = "remote"  # holds blocks for its whole prompt, which a prefill worker computes
    RUNNING = "running"  # holds blocks; prefills or decodes here
    FINISHED = "finished"  # holds no blocks, unless it is pinned


class TokenScores(Struct, frozen=True):
    """Log-probabilities of prompt tokens that follow each other; see PromptLogprobs."""

    logprobs: NDArray[np.float32]  # [rows]
    ranks: NDArray[np.uint32]  # [rows]
    top_ids: NDArray[np.uint32]  # [rows, num_top]
    top_logprobs: NDArray[np.float32]  # [rows, num_top]


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Prompt and output of one request, and the KV blocks that hold them.

    A `prefill_only` sequence ends after the one token that its prompt yields. If it is `pinned`, it keeps its blocks
    after its end, because somebody still reads them, until the owner calls `Engine.unpin`.
    """

    request_id: str
    token_ids: list[int]  # prompt + output; replayed output is there from the start; see PENDING
    num_prompt_tokens: int
    sampling: SamplingParams
    _: KW_ONLY
    priority: int = 0  # higher runs first
    prefill_only: bool = False
    pinned: bool = False
    hash_seed: int = SEED  # of the block hashes; sequences of different seeds share no blocks
    hint: CacheHint = NO_HINT  # what becomes of its prompt's blocks when it has ended
    matcher: Matcher | None = None  # of the grammar of `sampling`, fresh
    due_s: float = inf  # when its first token is due, on time.monotonic(); once an engine has it, on that one's clock
    images: List[Image] = ()  # of the prompt, in order
    pooling: Pooling | None = None  # asked for in the place of text
    adapter: str = ""  # of the model, by name
    transfer: bytes = b""  # what an engine's own connector says of where the prompt's KV is, until the first token
    needs: Needs = field(init=False)  # of `sampling`; kept, because every step asks for it
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    arrival: int | None = field(default=None, init=False)  # its place in the engine's order of arrival
    num_prefill_tokens: int = field(default=0, init=False)  # those that this engine runs as prompt chunks
    num_computed_tokens: int = field(default=0, init=False)  # those whose KV is in the slab
    num_in_flight_tokens: int = field(default=0, init=False)  # those whose KV the steps on their way write
    num_pending_tokens: int = field(default=0, init=False)  # those that these steps sample: the last of token_ids
    num_draft_tokens: int = field(default=0, init=False)  # of these, those that are guessed
    num_accepted_tokens: int = field(default=0, init=False)  # of the output: they were guessed right
    num_cached_tokens: int = field(default=0, init=False)  # the prefix hit of the first allocation
    num_preemptions: int = field(default=0, init=False)
    num_unscored: int = field(
        default=0, init=False
    )  # last prompt tokens whose log-probabilities are asked for, unknown
    scores: list[TokenScores] | None = field(default=None, init=False)  # of those before; None: not asked for, or taken
    block_table: list[int] = field(default_factory=list, init=False)
    window_table: list[int] = field(default_factory=list, init=False)
    # Where block_table lies in layers with a window, as far as it is held; empty: as in the others.
    retired_blocks: list[int] = field(default_factory=list, init=False)  # replaced by canonical ones, but still read
    moves: list[Move] = field(default_factory=list, init=False)  # of its blocks, which its next step comes after
    num_committed_blocks: int = field(default=0, init=False)  # leading ones of block_table, in the prefix cache
    block_hashes: list[int] = field(default_factory=list, init=False)  # of leading full blocks, as far as needed
    sequence_hashes: list[int] = field(default_factory=list, init=False)
    chunks: list[tuple[float, float, int]] = field(default_factory=list, init=False)  # see note_chunk
    leader: "Sequence | None" = field(default=None, init=False)  # while it waits: who computes its next blocks
    num_looked_up: int = field(default=-1, init=False)  # cached tokens while it waits, as seen last; -1: nobody looked
    num_led_tokens: int = field(default=0, init=False)  # leading ones that it has in common with its leader
    seen: Seen | None = field(default=None, init=False)  # once the prompt is computed, where it has images
    hashed_tokens: "array[int]" = field(default_factory=lambda: array("I"), init=False)  # of these blocks

    def __post_init__(self) -> None:
        assert 0 < self.num_prompt_tokens <= len(self.token_ids)
        assert self.matcher is None or self.sampling.grammar is not None  # vLLM has masks of its own
        assert self.prefill_only or not self.pinned, "only a prefill-only sequence has readers of its blocks"
        self.needs = self.sampling.needs
        if self.sampling.prompt_logprobs is not None:
            self.num_unscored, self.scores = self.num_prompt_tokens - 1, []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """The output tokens, pending ones included; the output position of the token that a new step samples."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_position(self) -> int:
        """The output position of the first token that is not known, which its noise depends on."""
        return self.num_output_tokens - self.num_pending_tokens

    @property
    def is_plain(self) -> bool:
        """Whether the next token depends on logits, temperature and noise alone, and no logprobs are asked for."""
        return self.needs is Needs.KERNEL and self.next_position >= self.sampling.min_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output, without pending tokens."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def known_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_known_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The known output tokens."""
        return self.output_from(0)

    def output_from(self, position: int) -> list[int]:
        """The known output tokens from an output position on."""
        return self.token_ids[self.num_prompt_tokens + position : self.num_known_tokens]

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that are computed or on their way; the next step begins after them."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens + self.num_in_flight_tokens < self.num_prefill_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether its next step samples a token: its prompt is computed or on its way, and the last token not yet."""
        if self.status is not SequenceStatus.RUNNING or self.is_prefilling:
            return False
        if not self.num_pending_tokens:
            return True
        if self.num_draft_tokens:  # how far it goes on is known when they are verified
            return False
        return not self.prefill_only and len(self.token_ids) - self.num_prompt_tokens < self.sampling.max_tokens

    @property
    def order(self) -> tuple[int, int]:
        """The smallest runs first and is preempted last: higher priority, then earlier arrival."""
        assert self.arrival is not None
        return (-self.priority, self.arrival)

    @property
    def prompt_counts(self) -> TokenCounts:
        return TokenCounts(cached_tokens=self.num_cached_tokens).of_prompt(self.num_prompt_tokens)

    def found(self, num_tokens: int) -> None:
        """So many leading tokens need not be computed. What counts as cached is what the first allocation found."""
        self.num_computed_tokens = num_tokens
        if self.num_preemptions == 0:
            self.num_cached_tokens = num_tokens

    @property
    def num_cacheable_tokens(self) -> int:
        """Leading tokens that need not be computed where their KV is cached: their log-probabilities are known, or not
        asked for."""
        if not self.num_unscored:
            return self.num_tokens
        return self.num_prompt_tokens - 1 - self.num_unscored

    def guess(self, draft: List[int]) -> None:
        """Writes in the tokens of a draft, which the next step verifies."""
        self.num_draft_tokens = len(draft)
        self.num_pending_tokens += len(draft)
        self.token_ids += draft

    def learn(self, token_ids: List[int]) -> None:
        """Writes in what a step sampled, in the place of as many pending tokens, or of a whole draft."""
        end, num_written = self.num_known_tokens, self.num_draft_tokens + 1
        self.token_ids[end : end + num_written] = token_ids
        self.num_pending_tokens -= num_written
        self.num_draft_tokens = 0

    def add_scores(self, scores: TokenScores) -> None:
        """Takes the log-probabilities of the next prompt tokens."""
        assert self.scores is not None, "nobody takes them before they are complete"
        self.scores.append(scores)
        self.num_unscored -= len(scores.logprobs)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Returns the log-probabilities of the whole prompt, once; None when they are not asked for, or were taken."""
        if self.scores is None:
            return None
        assert not self.num_unscored, "a token is sampled after the whole prompt"
        scores, self.scores = self.scores, None
        columns = {
            name: b"".join(getattr(one, name).tobytes() for one in scores) for name in TokenScores.__struct_fields__
        }
        return PromptLogprobs(num_top=scores[0].top_ids.shape[1] if scores else 0, **columns)

    def note_chunk(self, start_s: float, end_s: float, num_tokens: int) -> None:
        """Remembers when a step computed prompt tokens (time.monotonic); beyond MAX_CHUNKS the last entry grows."""
        if len(self.chunks) == MAX_CHUNKS:
            start_s, _, earlier = self.chunks.pop()
            num_tokens += earlier
        self.chunks.append((start_s, end_s, num_tokens))

    def hash_blocks(self, num_blocks: int, block_size: int) -> None:
        """Extends both hash lists to the first `num_blocks` blocks, which must be full. A block is hashed once."""
        known = len(self.block_hashes)
        if num_blocks <= known:
            return
        tokens = array("I", self.token_ids[known * block_size : num_blocks * block_size])
        assert len(tokens) == (num_blocks - known) * block_size
        self.hashed_tokens += tokens
        seed = lora_seed(self.adapter, self.hash_seed)
        new = block_hashes(np.frombuffer(tokens, dtype=np.uint32), block_size, seed)
        new = with_images(new, self.images, block_size, known)
        parent = self.sequence_hashes[-1] if known else None
        self.block_hashes.extend(new.tolist())
        self.sequence_hashes.extend(sequence_hashes(new, parent).tolist())

    def hash_reusable_blocks(self, block_size: int) -> int:
        """Hashes the blocks that need not be computed where they are cached, and returns how many they are."""
        num_blocks = min(self.num_tokens - 1, self.num_cacheable_tokens) // block_size
        self.hash_blocks(num_blocks, block_size)
        return num_blocks

    def shared_tokens(self, other: "Sequence", block_size: int) -> int:
        """Leading tokens in whole blocks that this prompt has in common with another one that has blocks, by their
        hashes, and that need not be computed for this one where they are cached."""
        ours, theirs = self.sequence_hashes, other.sequence_hashes
        end = min(self.hash_reusable_blocks(block_size), len(theirs))
        return bisect_left(range(end), True, key=lambda i: ours[i] != theirs[i]) * block_size

    def block_tokens(self, first: int, end: int, block_size: int) -> NDArray[np.uint32]:
        """Tokens of hashed blocks [first, end) -> [end - first, block_size]. Drop it before more blocks are hashed,
        because it is a view."""
        tokens = np.frombuffer(self.hashed_tokens, dtype=np.uint32)
        return tokens[first * block_size : end * block_size].reshape(-1, block_size)

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self.status.value} "
            f"computed {self.num_computed_tokens}/{self.num_tokens} blocks {len(self.block_table)}>"
        )
