"""A validated, tokenized request and what is streamed back for it: the contract between the APIs and generation.

Objects that every request or piece needs are Structs, because making a frozen dataclass takes ten times as long.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Struct, UnsetType, field

from baton_proto.images import Image
from baton_proto.pooling import Pooling
from baton_proto.sampling import PromptLogprobs, SamplingParams, TokenLogprobs
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import NO_HINT, CacheHint
from router.counters.recent import Service
from router.parsing.events import Event, Text
from router.parsing.parsing import Parsing
from router.requests.draw import Draw
from router.requests.rate_limits import Account
from runtime.blocks.block_hash import SEED


class GenerateRequest(Struct, frozen=True):
    """A request that has passed all checks: only the service can still fail."""

    request_id: str
    prompt: npt.NDArray[np.uint32]  # [num_prompt_tokens], at least one
    sampling: tuple[SamplingParams, ...]  # one per choice; choice i differs by its seed
    stop: tuple[str, ...]  # stop strings; the text ends before the first one, or with it
    deadline_s: float  # on time.monotonic()
    first_by_s: float = math.inf  # the same for its first token: it is refused when that cannot come in time
    priority: int = 0
    account: Account | None = None  # which its tokens are charged to
    tenant: str = ""  # who shares the router with others; empty: all callers that name none
    hash_seed: int = SEED  # of the block hashes; requests of different seeds share no cached blocks
    hint: CacheHint = NO_HINT
    images: Sequence[Image] = ()  # of the prompt, in order
    pooling: Pooling | None = None  # asked for in the place of text
    adapter: str = ""  # of the model, which alone may answer; empty: the model without one
    parsing: Parsing | None = None  # None: the text is all
    grammar_field: str = "grammar"  # the caller's name of what the grammar comes from
    includes_stop: bool = False  # the stop string or stop token that ends a choice belongs to its text
    spells_special: bool = False  # special tokens belong to the text
    draw: Draw = field(default_factory=Draw.fresh)
    begun: Sequence[Sequence[int]] = ()  # of each choice: the first tokens of its output, which the client has
    weights: Sequence[int] = ()  # of each choice: those that computed what the client has, see weights_tag; 0: any
    cuts: Sequence[Sequence[int]] = ()  # of each choice: after so many tokens a piece ends, in order; none: none does


class Parsed(Struct, frozen=True):
    """What a piece adds to an answer that is taken apart."""

    events: list[Event]
    reasoning_tokens: int


class Piece(Struct, frozen=True, gc=False):
    """New output of one choice, in order. `text` may lag behind the tokens; only the last piece has `finish_reason`."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None  # "stop" | "length" | "tool_calls" | "repetition"
    logprobs: list[TokenLogprobs] = []  # one per token, or none
    parsed: Parsed | None = None  # with GenerateRequest.parsing; it may lag behind `text`
    stop_reason: int | str | UnsetType = UNSET  # the stop string or stop token of the request that has ended the choice
    prompt_logprobs: PromptLogprobs | None = None  # with the first piece, where they are asked for
    weights: int = 0  # that computed it, see weights_tag
    pooled: bytes = b""  # see Delta

    @property
    def events(self) -> Sequence[Event]:
        """The parts of its text."""
        if self.parsed is not None:
            return self.parsed.events
        return (Text(self.text),) if self.text else ()

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self.parsed is None else self.parsed.reasoning_tokens


class Finished(Struct, frozen=True):
    """Last item of the stream."""

    tokens: TokenCounts
    served_by: Sequence[Service] = ()

    @property
    def accepted_tokens(self) -> int:
        return sum(service.accepted_tokens for service in self.served_by)

    @property
    def total_tokens(self) -> int:
        return self.tokens.prompt_tokens + self.tokens.output_tokens


def sum_of(requests: Sequence[Finished]) -> Finished:
    """Adds up the prompts of one call."""
    tokens = TokenCounts()
    for one in requests:
        tokens.add(one.tokens)
    return Finished(tokens, [service for one in requests for service in one.served_by])
