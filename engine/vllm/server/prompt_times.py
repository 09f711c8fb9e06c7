"""How long a server takes to compute prompts, as far as the times of their first tokens tell. Pure.

A server computes the prompts that wait one after the other, or several in one step. Hence a prompt was computed from
the first token of the one before it, or from its own arrival if that is later, until its own first token. On a busy
server that is not so: where a prompt waited for no other, its way to the engine and back, behind all that answers send,
takes longer than its step. It says nothing then.
"""

from typing import Final

from msgspec.structs import replace

from baton_proto.discovery import TimedStep
from runtime.config.step_times import token_pairs

TOGETHER_S: Final = 0.005  # first tokens of one step come so close together,
TOGETHER_SHARE: Final = 0.1  # or within this share of what the step took
BUSY: Final = 8  # answers under way


class PromptTimes:
    """Times are on the caller's clock."""

    def __init__(self) -> None:
        self._step: TimedStep | None = None  # the last one, which may have more prompts
        self._ended_s = 0.0  # its first token
        self._says_nothing = False

    def computed(
        self, begun_s: float, ended_s: float, tokens: int, cached: int, sequences: int, context_tokens: int
    ) -> TimedStep | None:
        """A prompt of `cached` tokens and these has its first token, while so many sequences decoded. Returns the step
        before, if this prompt was not a part of it and it says something."""
        pairs, last = token_pairs(cached, tokens), self._step
        if last is not None and ended_s - self._ended_s <= max(TOGETHER_S, TOGETHER_SHARE * last.step_ms / 1000):
            more = {"prompt_tokens": last.prompt_tokens + tokens, "prompt_pairs": last.prompt_pairs + pairs}
            self._step = replace(last, **more, step_ms=last.step_ms + (ended_s - self._ended_s) * 1000)
            last = None
        else:
            if self._says_nothing:
                last = None
            self._says_nothing = sequences > BUSY and begun_s > self._ended_s
            step_ms = (ended_s - max(begun_s, self._ended_s)) * 1000
            self._step = TimedStep(tokens, pairs, sequences, context_tokens if sequences else 0, step_ms)
        self._ended_s = ended_s
        return last

    def forget(self) -> None:
        """Other prompts were computed, too, of which nothing is known."""
        self._step = None
