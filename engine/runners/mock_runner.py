"""The runner of the mock engine, which computes nothing and tells how long a real runner would have taken.

Because its tokens depend on the sampling parameters and the output position alone, a replay on another worker continues
the same text. Each batch advances the runner's own clock, `now_s`: `TimedLoop` waits for it, a simulation reads it. No
torch.
"""

from collections.abc import Sequence as Run

import numpy as np

from baton_proto.sampling import TokenLogprobs
from engine.core.timed_steps import work_of
from engine.runners.draft_rows import sampled_in_turn
from engine.sequences.batch import Batch, LayerDone, SampledToken, ScheduledSequence, StepDone
from engine.sequences.sequence import Sequence, TokenScores
from runtime.config.step_times import StepTimes
from runtime.grammar.matcher import Matcher

MASK_64 = 2**64 - 1
LOGPROB = -1.0  # of every token: there are no probabilities


class MockRunner:
    """Implements `engine.sequences.batch.Runner`. `vocabulary`: the tokens of answers; `eos` ends an answer."""

    num_layers = 1
    depth = 0

    def __init__(self, times: StepTimes, answer_tokens: int, vocabulary: Run[int], eos: int) -> None:
        assert vocabulary
        self.now_s = 0.0
        self._times = times
        self._answer_tokens = answer_tokens  # it ends by itself then
        self._vocabulary = vocabulary
        self._eos = eos

    def clock(self) -> float:
        return self.now_s

    def submit(self, batch: Batch, layer_done: LayerDone | None = None) -> StepDone:
        work = work_of(batch)
        ms = self._times.step_ms(work.prompt_tokens, work.prompt_pairs, work.sequences, work.context_tokens)
        self.now_s += ms / 1e3
        if layer_done is not None:
            layer_done(0)
        scored = [_scores(item, positions) for item, positions in batch.scored]
        sampled = sampled_in_turn(batch.items, lambda _, sequences: [self._sample(one) for one in sequences])
        return StepDone(sampled, scored)

    def _sample(self, sequence: Sequence) -> SampledToken:
        sampling = sequence.sampling
        position = sequence.next_position
        if sequence.matcher is not None:
            token_id = self._matching(sequence, sequence.matcher)
        elif position + 1 >= max(self._answer_tokens, sampling.min_tokens + 1) and not sampling.ignore_eos:
            token_id = self._eos
        else:
            key = sequence.token_ids[sequence.num_known_tokens - 1] if sampling.is_greedy else sampling.seed
            token_id = self._vocabulary[_mixed(key, position) % len(self._vocabulary)]
        if sampling.logprobs is None:
            return SampledToken(token_id, None)
        top = [(token_id, LOGPROB)] if sampling.logprobs else []
        return SampledToken(token_id, TokenLogprobs(LOGPROB, top))

    def _matching(self, sequence: Sequence, matcher: Matcher) -> int:
        """A token that the grammar allows; the end as soon as there is one."""
        words = matcher.mask(sequence.output_token_ids)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if self._eos in allowed:
            return self._eos
        key = 0 if sequence.sampling.is_greedy else sequence.sampling.seed
        return int(allowed[_mixed(key, sequence.next_position) % len(allowed)])


def _scores(item: ScheduledSequence, positions: range) -> TokenScores:
    """Scores every token of a prompt as the best one."""
    tokens = np.array(item.sequence.token_ids[positions.start + 1 : positions.stop + 1], dtype=np.uint32)
    logprobs = np.full(len(tokens), LOGPROB, dtype=np.float32)
    num_top = min(1, item.sequence.sampling.prompt_logprobs or 0)
    return TokenScores(
        logprobs, np.ones(len(tokens), dtype=np.uint32), tokens[:, None][:, :num_top], logprobs[:, None][:, :num_top]
    )


def _mixed(key: int, counter: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood, 2014) on a key and a counter."""
    value = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)
