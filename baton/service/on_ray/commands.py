"""What the command line does to a service on a Ray cluster: bring it up, take it down."""

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import ray
import structlog
from ray.exceptions import ActorAlreadyExistsError, GetTimeoutError, RayActorError, RayTaskError

from baton.service.on_ray.cluster import find_actor, on_head
from baton.service.on_ray.control import Control, State
from baton.service.on_ray.launcher import CONTROL, RayLauncher
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from baton_proto.rollout import News
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, UnavailableError
from runtime.security.keys import given

ANSWER_S: Final = 20.0  # within which a control actor that lives answers
AGAIN_S: Final = 0.2
TOLD_AT_THE_END: Final = ("lost", "draining", "stopped")

log = structlog.get_logger()


def bring_up(config: ServingConfig, options: dict[str, Any], tell: Tell) -> None:
    """Returns when the service serves and its planner is at work. Raises ConfigError when the namespace is served
    already; any other error leaves nothing new behind."""
    control = _new_control(config, options)
    last = "planner" if config.planner.enabled else "serving"
    for news in _follow(control):
        tell(news.line, event=news.event, **news.fields)
        if news.event == last:
            return
    state = _ask(control.state.remote())
    ray.kill(control)
    raise state.error or UnavailableError("the service was told to end before it was up")


def take_down(namespace: str, tell: Tell) -> bool:
    """Drains and ends everything. False when not all ended in order. Raises UnavailableError without a service."""
    control = find_actor(CONTROL)
    drained = None if control is None else _drained(control, tell)
    left = asyncio.run(_end_what_is_left(tell))
    if drained is None and left is None:
        raise UnavailableError(f"nothing serves {namespace!r} on this cluster")
    return drained is not False and left is not False


def _new_control(config: ServingConfig, options: dict[str, Any]) -> Any:
    """Replaces a control actor whose service is over. Raises ConfigError when there is one that serves."""
    deadline_s = time.monotonic() + ANSWER_S
    place = on_head() | {"name": CONTROL, "lifetime": "detached", "max_restarts": 0}
    while True:
        try:
            control: Any = ray.remote(Control).options(**place).remote(config, given(os.environ), options)
            _ask(control.start.remote())
        except ActorAlreadyExistsError:
            _clear_away(find_actor(CONTROL), config.namespace)
            if time.monotonic() > deadline_s:
                raise UnavailableError("the control actor of before does not end") from None
            time.sleep(AGAIN_S)
        else:
            return control


def _clear_away(control: Any | None, namespace: str) -> None:
    if control is None:
        return
    if not _ask(control.state.remote()).over:
        problem = f"{namespace!r} is served on this cluster already; `baton down` ends it"
        raise ConfigError("namespace", problem)
    ray.kill(control)


def _drained(control: Any, tell: Tell) -> bool | None:
    """Ends the control actor. Whether its service ended in order; None: it had no service, hangs or has died."""
    clean = None
    try:
        _ask(control.stop.remote())
        for news in _follow(control):
            if news.event in TOLD_AT_THE_END:
                tell(news.line, event=news.event, **news.fields)
            clean = news.fields.get("clean", clean)
    except UnavailableError as error:
        log.warning("the control actor does not end the service", error=str(error))
    ray.kill(control)
    return clean


def _follow(control: Any) -> Iterator[News]:
    seen, over = 0, False
    while not over:
        state: State = _ask(control.next_state.remote(seen), None)
        yield from state.news
        seen, over = seen + len(state.news), state.over


def _ask(call: Any, timeout_s: float | None = ANSWER_S) -> Any:
    """Raises UnavailableError when the actor is gone or does not answer."""
    try:
        return ray.get(call, timeout=timeout_s)
    except GetTimeoutError as error:
        raise UnavailableError(f"the actor does not answer within {timeout_s:g} s") from error
    except RayActorError as error:
        raise UnavailableError(f"the actor has died: {error}") from error
    except RayTaskError as error:
        raise UnavailableError(f"the actor failed: {error.cause}") from error


async def _end_what_is_left(tell: Tell) -> bool | None:
    """Ends the processes that no control actor has ended. Whether all ended in order; None: there were none."""
    launcher = RayLauncher(ServingConfig())
    living = await launcher.living()
    if not living:
        return None
    supervisor = Supervisor(living[0][0].config, launcher=launcher)
    supervisor.take_over(living)
    tell("draining", event="draining")
    clean = await supervisor.stop()
    tell("all processes have ended", event="stopped", clean=clean)
    return clean
