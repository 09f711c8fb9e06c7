"""What came of a step: the news of sequences, and how a sequence's newest token ends it."""

from msgspec import Struct

from baton_proto.kv_events import KvEvent
from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from engine.sequences.batch import SampledToken
from engine.sequences.sequence import Sequence


class SequenceOutput(Struct, frozen=True):
    """News of one sequence. Nothing follows the one with `finish`."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # as many as token_ids, or none
    finish: str | None = None  # "stop" | "length" | "prefill" | "error"
    stop_token: int | None = None  # the EOS or stop token that ended it, which is the last of token_ids
    error: str | None = None  # the reason of finish "error"
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, where they are asked for
    refused: bool = False  # the error is the request's: this engine cannot serve it, another kind of engine may
    invalid: bool = False  # the error is the request's, wherever it is served
    pooled: bytes = b""  # see Delta


class StepOutput(Struct, frozen=True):
    """What came of a step. With `num_tokens` 0 and no outputs, every sequence waits until somebody frees blocks, or the
    tiers have copied some."""

    outputs: list[SequenceOutput]
    events: list[KvEvent]
    num_tokens: int = 0  # submitted to the runner, or else collected from it
    restored: bool = False  # whether sequences that waited for the tiers may go on
    may_wait: bool = False  # none has a first or last token, and a step of decodes is on its way
    step_ms: list[float] = []  # how long the steps took whose end this tells; empty where the load alone says it

    @property
    def is_news(self) -> bool:
        return bool(self.num_tokens or self.outputs or self.events or self.restored)


def news_of(
    sequence: Sequence, tokens: list[SampledToken], finish: str | None = None, stop_token: int | None = None
) -> SequenceOutput:
    """The tokens that a step brought; with the first one the prompt's log-probabilities, where they are asked for."""
    token_ids = [token.token_id for token in tokens]
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    asked = None if sequence.scores is None else sequence.take_prompt_logprobs()
    return SequenceOutput(sequence, token_ids, logprobs, finish, stop_token, prompt_logprobs=asked)


def finish_reason(sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]) -> tuple[str | None, int | None]:
    """(finish, stop token) of the newest token. Invariant: the sampler gives no stop token before `min_tokens`."""
    sampling = sequence.sampling
    if sequence.prefill_only:
        return "prefill", None
    if token_id in sampling.stop_token_ids:
        return "stop", token_id
    # A grammar allows EOS where nothing else may follow.
    if token_id in eos_token_ids and not (sampling.ignore_eos and sampling.grammar is None):
        return "stop", token_id
    if sequence.next_position >= sampling.max_tokens:
        return "length", None
    return None, None
