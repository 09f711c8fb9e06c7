"""What callers of Anthropic's API allow a service to leave out of a long conversation. We leave nothing out, so that
what is cached stays what is asked."""

from collections.abc import Sequence

from msgspec import Struct

from router.api.wishes.names import Name
from runtime.errors import InvalidRequestError, shown

CLEARING = ("clear_tool_uses_", "clear_thinking_")
"""Begin the types of edits that may be left undone."""


class Edit(Struct, frozen=True, kw_only=True):
    """What it says beside its type, when and how much, has no effect."""

    type: Name


class ContextManagement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    edits: Sequence[Edit] | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for edits that would add something to the answer."""
        for i, edit in enumerate(self.edits or ()):
            if not edit.type.startswith(CLEARING):
                problem = f"is {shown(edit.type)}; only clear_tool_uses and clear_thinking are taken, without effect"
                raise InvalidRequestError(f"context_management.edits[{i}].type", problem)
