"""The router's memory of its last placements, for `baton events explain`."""

import re
from collections import deque
from typing import Final

from msgspec import Struct

from router.placement.candidates import Request
from router.placement.placement import Placement, Weighing

MAX_DECISIONS: Final = 1024
MAX_COSTS: Final = 100_000  # of all decisions together: about 20 MB, however many workers there are
CALLERS_ID = re.compile(r"(.+)-[0-9a-f]{8}")  # see validation.make_request_id


class Decision(Struct, frozen=True):
    request_id: str  # of the work, as in the log
    choice: int
    attempt: int
    at_s: float  # monotonic
    waited_s: float
    request: Request
    weighing: Weighing
    placement: Placement | None  # None: it was refused
    expected_ms: float  # until the first token


class DecisionLog:
    def __init__(self, max_decisions: int = MAX_DECISIONS, max_costs: int = MAX_COSTS) -> None:
        self._max_decisions = max_decisions
        self._max_costs = max_costs
        self._decisions: deque[Decision] = deque()
        self._num_costs = 0

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: Decision) -> None:
        """Remembers a decision, and forgets the oldest ones beyond the limits."""
        self._decisions.append(decision)
        self._num_costs += decision.weighing.num_candidates
        while len(self._decisions) > self._max_decisions or (
            self._num_costs > self._max_costs and len(self._decisions) > 1
        ):
            self._num_costs -= self._decisions.popleft().weighing.num_candidates

    def of(self, request_id: str) -> tuple[list[Decision], int]:
        """Decisions of a request in order, and how many older requests have the same caller's id.

        `request_id`: the id in the log, or the caller's own id, which means the latest request of that id.
        """
        by_work: dict[str, list[Decision]] = {}
        for decision in self._decisions:
            if request_id in (decision.request_id, callers_id(decision.request_id)):
                by_work.setdefault(decision.request_id, []).append(decision)
        if request_id in by_work:
            return by_work[request_id], 0
        if not by_work:
            return [], 0
        return list(by_work.values())[-1], len(by_work) - 1


def callers_id(request_id: str) -> str:
    """The id that the caller gave to a request whose log name is `request_id`."""
    match = CALLERS_ID.fullmatch(request_id)
    return match[1] if match else request_id
