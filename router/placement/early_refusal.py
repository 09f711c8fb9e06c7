"""Whether a request is refused at once because its first token cannot come in time. Pure: what placement expects of
each worker and what waits before the request in, the expected time out.

What is expected is the earliest of all workers that may take the request, whichever of them placement chooses.
"""

import math

from router.placement.placement import Weighing


class TooLate(Exception):  # noqa: N818 (a decision, which its caller makes a BatonError)
    """The first token is expected in `expected_ms`, after it is due."""

    def __init__(self, weighing: Weighing, expected_ms: float) -> None:
        super().__init__(expected_ms)
        self.weighing = weighing
        self.expected_ms = expected_ms


def check_in_time(weighing: Weighing, tokens_before: float, due_ms: float) -> None:
    """Raises TooLate. When nobody could take the request at any time, nothing is expected, and it may wait. When a
    worker that runs prompts has none queued, the request runs until its deadline.

    tokens_before: to be computed of prompts that wait at the router and get workers before this one; due_ms: when the
    first token is due, from now on.
    """
    chosen = weighing.decode.chosen
    if math.isinf(due_ms) or (not tokens_before and chosen >= 0 and weighing.decode.ttft_ms(chosen) <= due_ms):
        return
    runs = weighing.prefill if len(weighing.prefill) else weighing.decode
    if not tokens_before and runs.has_idle():
        return  # to come again would not help, and only answers teach how fast the workers are
    soonest = weighing.decode.soonest_ms(full_ones=False)
    if math.isinf(soonest):
        soonest = runs.soonest_ms(full_ones=True)
    expected = soonest + runs.share_ms(tokens_before)
    if due_ms < expected < math.inf:
        raise TooLate(weighing, expected)
