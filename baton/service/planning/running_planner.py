"""The planner beside a service: it begins with it, and stands aside while somebody else changes the workers."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from baton.service.supervisor import Supervisor
from baton.service.telling import Tell

if TYPE_CHECKING:
    from baton.service.planning.live_planner import LivePlanner


class RunningPlanner:
    """A context that ends before the service drains: from then on the planner starts nothing. Raises what
    live_planner() raises."""

    def __init__(self, supervisor: Supervisor, tell: Tell, kept: Callable[[], int]) -> None:
        """`kept`: as in live_planner()."""
        self._supervisor = supervisor
        self._kept = kept
        self._tell = tell
        self._context = AsyncExitStack()
        self._planner: LivePlanner | None = None

    async def __aenter__(self) -> "RunningPlanner":
        if self._supervisor.config.planner.enabled:
            from baton.service.planning.live_planner import live_planner  # late: numpy takes time to load

            self._planner = await self._context.enter_async_context(
                live_planner(self._supervisor, self._tell, self._kept)
            )
        return self

    async def __aexit__(self, *error: object) -> None:
        self._planner = None
        await self._context.aclose()

    @asynccontextmanager
    async def aside(self, why: str) -> AsyncIterator[None]:
        """A context in which the planner begins nothing, and what it had begun has ended. After it a new one goes on,
        with the configuration of that time."""
        try:
            if self._planner is not None:
                await self._planner.hold(why)
            yield
        finally:
            await self.__aexit__()
            await self.__aenter__()
