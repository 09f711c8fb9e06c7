"""The duration of an engine step: formulas that the mock engine, the planner and the simulator share.

A step that computes n prompt tokens takes max(floor, token * n + pair * pairs). A step in which B sequences with K
tokens of context in all decode takes floor + sequence * B + token * K. A step that does both takes the sum without the
second floor, because it reads the weights once.
"""

from typing import Final

from msgspec import Struct

from runtime.config.types import Weight


def token_pairs(start: int, count: int) -> float:
    """Pairs of tokens that attention computes for `count` tokens behind `start` earlier ones of their sequence."""
    return count * (start + count / 2)


def prefill_time(floor: float, token: float, pair: float, tokens: float, pairs: float) -> float:
    """The result has the unit of the three coefficients. numba compiles it, too."""
    return max(floor, token * tokens + pair * pairs)


def decode_time(floor: float, sequence: float, token: float, sequences: float, context_tokens: float) -> float:
    """The result has the unit of the three coefficients; `floor` 0: beside prompts. numba compiles it, too."""
    return floor + sequence * sequences + token * context_tokens


class StepTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """The six coefficients in ms: the section `step_times` of serving.yaml."""

    prefill_floor_ms: Weight = 6.0
    prefill_token_ms: Weight = 0.02
    prefill_pair_ms: Weight = 1.2e-6
    decode_floor_ms: Weight = 5.0
    decode_sequence_ms: Weight = 0.02
    decode_token_ms: Weight = 4.2e-5

    def faster(self, factor: float) -> "StepTimes":
        """The times of an engine that is `factor` times as fast."""
        return StepTimes(*(ms / factor for ms in (*self.prefill, *self.decode)))

    @property
    def prefill(self) -> tuple[float, float, float]:
        """Floor, per token, per pair."""
        return self.prefill_floor_ms, self.prefill_token_ms, self.prefill_pair_ms

    @property
    def decode(self) -> tuple[float, float, float]:
        """Floor, per sequence, per token of context."""
        return self.decode_floor_ms, self.decode_sequence_ms, self.decode_token_ms

    def prefill_ms(self, tokens: float, pairs: float) -> float:
        return prefill_time(*self.prefill, tokens, pairs)

    def decode_ms(self, sequences: float, context_tokens: float) -> float:
        return decode_time(*self.decode, sequences, context_tokens)

    def beside_ms(self, sequences: float, context_tokens: float) -> float:
        """What the decodes of a step with prompts take."""
        return decode_time(0.0, self.decode_sequence_ms, self.decode_token_ms, sequences, context_tokens)

    def step_ms(self, tokens: float, pairs: float, sequences: float, context_tokens: float) -> float:
        """The duration of a step that computes prompts, decodes, or does both."""
        if tokens:
            return self.prefill_ms(tokens, pairs) + self.beside_ms(sequences, context_tokens)
        return self.decode_ms(sequences, context_tokens) if sequences else 0.0


USUAL: Final = StepTimes()
