"""Asks the planner over NATS what it wants and why, while somebody watches."""

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from baton_proto.planner_control import Plan
from runtime.errors import BatonError
from runtime.nats.client import NATS_ERRORS

DECISIONS: Final = 200  # that are remembered


class Decision(Struct, frozen=True):
    time_s: float  # Unix
    policy: str
    prefill: int  # wanted
    decode: int
    frozen: bool
    reasons: list[str]
    actions: list[str]
    by_hand: str  # what an operator has set; empty: nothing


class PlannerWatch:
    """Keeps the decisions that wanted something else than the one before, and the last one."""

    def __init__(self, ask: Callable[[], Awaitable[Plan]]) -> None:
        self.problem = ""  # why the planner says nothing
        self.last: Decision | None = None
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._ask = ask

    async def look(self) -> None:
        """Asks the planner."""
        try:
            plan = await self._ask()
        except (BatonError, *NATS_ERRORS) as error:
            self.problem, self.last = str(error) or type(error).__name__, None
            return
        self.problem = plan.problem
        before, self.last = self.last, _decision(plan)
        if self.last is not None and (before is None or _wish(before) != _wish(self.last)):
            self.decisions.append(self.last)

    @property
    def wanted(self) -> tuple[int, int] | None:
        return None if self.last is None else (self.last.prefill, self.last.decode)


def _decision(plan: Plan) -> Decision | None:
    target = plan.target
    if target is None:
        return None
    return Decision(
        target.time_s,
        target.policy,
        target.prefill,
        target.decode,
        target.frozen,
        target.reasons,
        [f"{one.verb} {one.worker_id} ({one.role}): {one.reason}" for one in target.actions],
        plan.holds.sentence(),
    )


def _wish(decision: Decision) -> tuple[object, ...]:
    return decision.prefill, decision.decode, decision.frozen, decision.actions, decision.by_hand
