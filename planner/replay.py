"""Replay: what another policy, or other settings, would have wanted for the observations of a journal.

The observations stay as they were recorded: the cluster does not react to the other policy. The simulator shows that.
"""

from collections.abc import Iterable
from itertools import pairwise

from msgspec import Struct

from baton_proto.planner import Observation, Target
from planner.journal import Decided, EffectEnded, Line
from planner.planner import Planner
from runtime.config.planner import PlannerConfig
from runtime.config.step_times import USUAL, StepTimes


class Replayed(Struct, frozen=True):
    """One recorded decision and the other policy's."""

    observation: Observation
    recorded: Target
    other: Target

    @property
    def differ(self) -> bool:
        return (self.recorded.prefill, self.recorded.decode) != (self.other.prefill, self.other.decode)


class Summary(Struct, frozen=True):
    """Figures of one side of a replay. Means are weighted by the time until the next decision."""

    policy: str
    decisions: int
    changes: int  # decisions whose counts differ from the previous one's
    frozen: int
    mean_prefill: float
    mean_decode: float
    most_prefill: int
    most_decode: int


class Replay(Struct, frozen=True):
    decisions: list[Replayed]
    effects: list[EffectEnded]


def replay(lines: Iterable[Line], config: PlannerConfig, step_times: StepTimes = USUAL) -> Replay:
    """Decides anew for each recorded observation, with a planner of `config` whose memory is empty at first."""
    planner = Planner(config, step_times)
    decisions, effects = [], []
    for line in lines:
        if isinstance(line, Decided):
            decisions.append(Replayed(line.observation, line.target, planner.decide(line.observation)))
        elif isinstance(line, EffectEnded):
            effects.append(line)
    return Replay(decisions, effects)


def summary(targets: list[Target]) -> Summary:
    """`targets`: at least one, in the order of time."""
    spans = [max(0.0, after.time_s - before.time_s) for before, after in pairwise(targets)]
    spans.append(1.0 if not any(spans) else 0.0)  # how long the last target held is unknown
    total_s = sum(spans)
    counts = [(target.prefill, target.decode) for target in targets]
    return Summary(
        targets[-1].policy,
        len(targets),
        sum(before != after for before, after in pairwise(counts)),
        sum(target.frozen for target in targets),
        sum(target.prefill * span for target, span in zip(targets, spans, strict=True)) / total_s,
        sum(target.decode * span for target, span in zip(targets, spans, strict=True)) / total_s,
        max(target.prefill for target in targets),
        max(target.decode for target in targets),
    )
