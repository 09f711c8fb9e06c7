"""Whether a request is refused at once because its first token cannot come in time. Pure: what placement expects of
each worker and what waits before the request in, the expected time out.

What is expected is the earliest of all workers that may take the request: placement chooses the soonest where none is
in time.
"""

import math

from router.placement.candidates import Work
from router.placement.cost import RUNS_PROMPT
from router.placement.placement import Weighing


class TooLate(Exception):  # noqa: N818 (a decision, which its caller makes a BatonError)
    """The first token is expected in `expected_ms`, after it is due."""

    def __init__(self, weighing: Weighing, expected_ms: float) -> None:
        super().__init__(expected_ms)
        self.weighing = weighing
        self.expected_ms = expected_ms


def check_in_time(weighing: Weighing, before: Work, due_ms: float) -> None:
    """Raises TooLate. When nobody could take the request at any time, nothing is expected, and it may wait. When a
    worker that runs prompts has none queued, the request runs until its deadline.

    weighing: for a first token that is due in `due_ms`, or, with work before it, at once.
    before: of prompts that wait at the router and get workers before this one. due_ms: from now on.
    """
    weighed, chosen = weighing.best
    expected = weighed.ttft_ms(chosen) if chosen >= 0 else weighing.runners.soonest_ms()
    if before.tokens:
        expected += weighing.runners.share_ms(before)
    if due_ms < expected < math.inf and (before.tokens or not _is_idle(weighing)):
        raise TooLate(weighing, expected)


def _is_idle(weighing: Weighing) -> bool:
    """Whether a worker that runs prompts has none queued. To come again would not help then, and only answers teach how
    fast the workers are."""
    weighed, chosen = weighing.best
    runs_it = chosen >= 0 and weighed.reason(chosen) >= RUNS_PROMPT
    return weighing.runners.has_idle() or (runs_it and weighed.has_idle())
