"""The answer of a policy, which guards may change: how many workers of each role are wanted, and why."""

from msgspec import Struct
from msgspec.structs import replace

from baton_proto.planner import PREFILL, Role


class Wanted(Struct, frozen=True):
    prefill: int
    decode: int
    reasons: tuple[str, ...] = ()
    figures: dict[str, float] = {}

    def of(self, role: Role) -> int:
        return self.prefill if role == PREFILL else self.decode

    def changed(self, role: Role, count: int, reason: str) -> "Wanted":
        """Returns the answer with another count of one role and the reason; the answer itself when the count is already
        `count`."""
        if count == self.of(role):
            return self
        return replace(self, **{role: count}, reasons=(*self.reasons, reason))
