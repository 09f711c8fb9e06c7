"""Guards: pure functions that take the counts that a policy wants and may change them, with a reason.

Because a later guard overrides an earlier one, their order is one of precedence: an operator's counts override the
policy's, the limits of each role override both, and the GPU budget overrides all. Two rules are elsewhere: stale
reports freeze everything (`planner/planner.py`), and a worker has one effect at a time (`ladder.py`).
"""

from collections.abc import Callable

from msgspec.structs import replace

from baton_proto.planner import DECODE, PREFILL, ROLES
from planner.policy import pace
from planner.policy.history import Situation
from planner.policy.observation import gpus_allowed, gpus_of_role
from planner.policy.wanted import Wanted

HOUR_S = 3600.0

Guard = Callable[[Wanted, Situation], Wanted]


def hold_by_hand(wanted: Wanted, now: Situation) -> Wanted:
    """An operator's counts hold until released. Held workers are only mentioned: the ladder leaves them alone."""
    for role, count in now.observation.holds.counts().items():
        reason = f"{count} {role} workers are set by hand; {wanted.of(role)} were wanted"
        wanted = wanted.changed(role, count, reason)
    if held := [worker.worker_id for worker in now.observation.workers if worker.held]:
        wanted = replace(wanted, reasons=(*wanted.reasons, f"left alone, held by hand: {', '.join(held)}"))
    return wanted


def cool_down(wanted: Wanted, now: Situation) -> Wanted:
    """A role shrinks at most once in DOWN_COOLDOWN_S."""
    for role in ROLES:
        have, since_s = now.counts[role].have, now.observation.time_s - now.history[role].down_s
        if wanted.of(role) < have and since_s < pace.DOWN_COOLDOWN_S:
            wanted = wanted.changed(role, have, f"{role} shrank {since_s:.0f} s ago: not again yet")
    return wanted


def limit_reversals(wanted: Wanted, now: Situation) -> Wanted:
    """A role does not shrink within REVERSAL_S after it grew, and grows within REVERSAL_S after it shrank at most
    REVERSALS_PER_HOUR times an hour."""
    for role in ROLES:
        have, history, time_s = now.counts[role].have, now.history[role], now.observation.time_s
        grew_s, shrank_s = time_s - history.up_s, time_s - history.down_s
        if wanted.of(role) < have and grew_s < pace.REVERSAL_S:
            wanted = wanted.changed(role, have, f"{role} grew {grew_s:.0f} s ago: it does not shrink yet")
        if wanted.of(role) > have and shrank_s < pace.REVERSAL_S:
            recent = sum(time_s - at_s < HOUR_S for at_s in history.reversals_s)
            if recent >= pace.REVERSALS_PER_HOUR:
                reason = f"{role} shrank {shrank_s:.0f} s ago and turned {recent} times this hour: it does not grow yet"
                wanted = wanted.changed(role, have, reason)
    return wanted


def within_limits(wanted: Wanted, now: Situation) -> Wanted:
    limits = now.config.limits
    for role, least, most in (
        (PREFILL, limits.min_prefill, limits.max_prefill),
        (DECODE, limits.min_decode, limits.max_decode),
    ):
        count = max(least, min(most, wanted.of(role)))
        bound = "least" if count == least else "most"
        wanted = wanted.changed(role, count, f"{count} {role} workers are the {bound}; {wanted.of(role)} were wanted")
    return wanted


def within_budget(wanted: Wanted, now: Situation) -> Wanted:
    """Because requests need both roles, both shrink in proportion, below their minimum only if nothing else fits."""
    budget = gpus_allowed(now.observation)
    gpus = {role: gpus_of_role(now.observation, role) for role in ROLES}
    least = {PREFILL: now.config.limits.min_prefill, DECODE: now.config.limits.min_decode}
    asked = {role: wanted.of(role) for role in ROLES}
    given = dict(asked)
    while sum(given[role] * gpus[role] for role in ROLES) > budget:
        richest = max(ROLES, key=lambda role: given[role] / asked[role] if given[role] > least[role] else 0.0)
        if given[richest] <= least[richest]:
            richest = max(ROLES, key=given.__getitem__)
        given[richest] -= 1
    for role in ROLES:
        whose = "the budget" if now.observation.gpu_share is None else "what other models leave"
        reason = f"{budget} GPUs are {whose}: {given[role]} {role} workers of {asked[role]} wanted"
        wanted = wanted.changed(role, given[role], reason)
    return wanted


def tell_of_failures(wanted: Wanted, now: Situation) -> Wanted:
    """Adds reasons only. The ladder starts no worker before `retry_s`, but may still wake or flip one."""
    for role in ROLES:
        history, have = now.history[role], now.counts[role].have
        wait_s = history.retry_s - now.observation.time_s
        if wanted.of(role) > have and wait_s > 0:
            reason = (
                f"{history.failures} starts of {role} workers failed ({history.failure}): next one in {wait_s:.0f} s"
            )
            wanted = replace(wanted, reasons=(*wanted.reasons, reason))
    return wanted


LIMITS: tuple[Guard, ...] = (hold_by_hand, within_limits, within_budget, tell_of_failures)
CALM: tuple[Guard, ...] = (cool_down, limit_reversals)


def guarded(wanted: Wanted, now: Situation, guards: tuple[Guard, ...]) -> Wanted:
    for guard in guards:
        wanted = guard(wanted, now)
    return wanted
