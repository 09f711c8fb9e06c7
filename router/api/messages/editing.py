"""Edits that callers of Anthropic's API allow in a long conversation. We leave nothing out, because otherwise the
prompt would no longer be the cached one."""

from collections.abc import Sequence

from msgspec import Struct

from router.api.wishes.names import Name
from runtime.errors import InvalidRequestError, shown

CLEARING = ("clear_tool_uses_", "clear_thinking_")
"""Beginnings of the types of edits that we may leave undone."""


class Edit(Struct, frozen=True, kw_only=True):
    """One allowed edit. Its other fields, when and how much, have no effect."""

    type: Name


class ContextManagement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    edits: Sequence[Edit] | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for edits that would add something to the answer."""
        for i, edit in enumerate(self.edits or ()):
            if not edit.type.startswith(CLEARING):
                problem = f"is {shown(edit.type)}; only clear_tool_uses and clear_thinking are taken, without effect"
                raise InvalidRequestError(f"context_management.edits[{i}].type", problem)
