"""Who could serve when: what decides whether an error was warranted. Pure: times are told, never read."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """The times, for each name, at which it was lost and came back, in order. A name that was never told of is lost."""

    _changes: dict[str, list[tuple[float, bool]]] = field(default_factory=lambda: defaultdict(list))
    _in_order: set[tuple[str, float]] = field(default_factory=set)

    def back(self, name: str, now_s: float) -> None:
        self._note(name, now_s, True)

    def lost(self, name: str, now_s: float) -> None:
        self._note(name, now_s, False)

    def left(self, name: str, now_s: float) -> None:
        """It serves no more, which is no loss: what it had begun, it has ended."""
        self._in_order.add((name, now_s))
        self._note(name, now_s, False)

    def able(self, name: str) -> bool:
        changes = self._changes.get(name)
        return bool(changes) and changes[-1][1]

    def gap(self, names: Iterable[str], start_s: float, end_s: float) -> bool:
        """Whether at an instant between start and end none of `names` was able."""
        names = list(names)
        instants = {start_s, end_s}
        for name in names:
            instants |= {at_s for at_s, _ in self._changes.get(name, ()) if start_s <= at_s <= end_s}
        return any(not any(self._able_at(name, at_s) for name in names) for at_s in instants)

    def losses(self, names: Iterable[str], start_s: float, end_s: float) -> int:
        """How often one of `names` was lost between start and end."""
        found = ((name, *change) for name in names for change in self._changes.get(name, ()))
        return sum(
            start_s <= at_s <= end_s and not able and (name, at_s) not in self._in_order for name, at_s, able in found
        )

    def _note(self, name: str, now_s: float, able: bool) -> None:
        if self.able(name) != able:
            self._changes[name].append((now_s, able))

    def _able_at(self, name: str, at_s: float) -> bool:
        """Whether `name` could be used at `at_s`; at the instant of a loss it could not."""
        able = False
        for changed_s, now_able in self._changes.get(name, ()):
            if changed_s > at_s:
                break
            able = now_able
        return able
