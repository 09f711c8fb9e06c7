"""The GPUs that the planners of several models share."""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from planner.policy.shares import Claim, share_of


class SharedBudget:
    """`kept`: GPUs that are for nobody here. Invariant: a planner learns its share, decides and begins its actions
    within `turn`, so what it knows of the others' claims is true until then."""

    def __init__(self, gpus: int, kept: Callable[[], int] = lambda: 0) -> None:
        self.turn = asyncio.Lock()
        self._gpus = gpus
        self._kept = kept
        self._claims: dict[str, Claim] = {}

    def member(self, model: str, holds: int, weight: int) -> "Member":
        """`holds`: GPUs, which the model keeps until its planner has decided."""
        self.claim(model, Claim(holds, wants=holds, least=holds, weight=weight))
        return Member(self, model, weight)

    def claim(self, model: str, claim: Claim) -> None:
        self._claims[model] = claim

    def share(self, model: str, holds: int) -> int:
        others = [claim for name, claim in self._claims.items() if name != model]
        mine = replace(self._claims[model], holds=holds)
        return share_of(mine, others, max(0, self._gpus - self._kept()))


class Member:
    """The part of one model's planner."""

    def __init__(self, budget: SharedBudget, model: str, weight: int) -> None:
        self.turn = budget.turn
        self._budget = budget
        self._model = model
        self._weight = weight

    def share(self, holds: int) -> int:
        return self._budget.share(self._model, holds)

    def claim(self, claim: Claim) -> None:
        self._budget.claim(self._model, replace(claim, weight=self._weight))
