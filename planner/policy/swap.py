"""Which models fall asleep for one that is to wake: all together hold no more GPUs than there are. Pure.

A model that sleeps holds none. In-flight answers are never cut, because who falls asleep drains first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

LEAST_AWAKE: Final = 10  # times as long as its last wake took: so swaps take a tenth of a busy model's time at most


class Tenant(Struct, frozen=True):
    """One model. `holds`: GPUs that it takes when it is awake, by the place where they are."""

    name: str
    holds: Mapping[str, int]
    priority: int = 0
    is_awake: bool = False
    sleeps: bool = True  # False: it never does
    idle_s: float = 0.0  # since its last request; 0: it has some in flight
    awake_s: float = 0.0  # since it woke
    wake_took_s: float = 0.0
    has_served: bool = False  # since it woke

    @property
    def had_its_turn(self) -> bool:
        """Whether it has answered all that it woke for, or has been awake for long enough."""
        return (self.has_served and self.idle_s > 0) or self.awake_s >= LEAST_AWAKE * self.wake_took_s


class Swap(Struct, frozen=True):
    """`asleep`: who falls asleep before the model wakes, in this order."""

    asleep: tuple[str, ...] = ()
    reason: str = ""


class Wait(Struct, frozen=True):
    """There is no room now. `reason`: a sentence for the callers."""

    reason: str


def make_room(wanted: Tenant, others: Sequence[Tenant], room: Mapping[str, int]) -> Swap | Wait:
    """`room`: GPUs by place, for all models together. Idle models fall asleep first, of these the one of the lowest
    priority that has been idle longest; then busy ones of no higher priority than the wanted one."""
    held = Counter[str]()
    for tenant in others:
        held.update(tenant.holds if tenant.is_awake else {})
    lacks = {place: held[place] + count - room.get(place, 0) for place, count in wanted.holds.items()}
    able = [one for one in others if one.is_awake and one.sleeps and (one.idle_s or one.priority <= wanted.priority)]
    chosen: list[Tenant] = []
    for tenant in sorted(able, key=lambda one: (not one.idle_s, one.priority, -one.idle_s)):
        helps = any(lacks.get(place, 0) > 0 for place in tenant.holds)
        if helps and tenant.had_its_turn:
            chosen.append(tenant)
            lacks = {place: lack - tenant.holds.get(place, 0) for place, lack in lacks.items()}
    if any(lack > 0 for lack in lacks.values()):
        holders = sorted(one.name for one in others if one.is_awake and not wanted.holds.keys().isdisjoint(one.holds))
        return Wait(f"its GPUs are held by {', '.join(holders) or 'nobody, and are too few'}")
    return Swap(tuple(one.name for one in chosen), "; ".join(map(_why, chosen)))


def _why(tenant: Tenant) -> str:
    busy = f"busy, priority {tenant.priority}, awake for {tenant.awake_s:.1f} s"
    return f"{tenant.name} was {f'idle for {tenant.idle_s:.1f} s' if tenant.idle_s else busy}"
