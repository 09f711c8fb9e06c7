"""Where a service is: as its user was told, or where the one runs that this user has on this machine."""

import asyncio

from baton.runs.run_file import SERVICE_FLAG, Run, choose_run
from runtime.address import parse_address
from runtime.config.model_entry import model_namespace
from runtime.config.types import NATS_SCHEMES
from runtime.errors import ConfigError, UnavailableError

NATS_FLAG = "--nats-url"
USUAL_ADDRESS = "127.0.0.1:8001"
USUAL_NATS_URL = "nats://127.0.0.1:4222"
WAY_OUT = "`baton up` starts a service here, which commands find by themselves; {flag} names one elsewhere"


def router_address(told: str) -> str:
    """HOST:PORT of the router's gRPC. `told`: that, or the name of a service, or nothing. Raises ConfigError,
    UnavailableError."""
    if ":" in told:
        return told
    run = choose_run(told or None, f"--address or {SERVICE_FLAG}")
    return USUAL_ADDRESS if run is None else _known(run, run.file.grpc)


def nats_place(told: str, namespace: str, model: str | None = None) -> tuple[str, str]:
    """NATS URL and namespace. `told`: a URL, or the name of a service, or nothing. A service that was found has its
    own namespace, unless `namespace` is another one than the default. `model`: a name gives the namespace of that
    one's workers, which must be named where several are served; None: the service's own. Raises ConfigError,
    UnavailableError."""
    scheme, colons, _ = told.partition("://")
    if colons and scheme not in NATS_SCHEMES:
        raise ConfigError(NATS_FLAG, f"{scheme}:// is no way to a NATS server: nats://HOST:PORT or tls://HOST:PORT")
    if ":" in told:
        return told, model_namespace(namespace, model) if model else namespace
    run = choose_run(told or None, f"{NATS_FLAG} or {SERVICE_FLAG}")
    if run is None:
        return USUAL_NATS_URL, model_namespace(namespace, model) if model else namespace
    namespace = run.file.namespace if namespace == "default" else namespace
    if model is None or (not model and not run.file.models):
        return _known(run, run.file.nats), namespace
    if not run.file.models:
        raise ConfigError("--model", "chooses among several models, and this service has one: leave it out")
    if model not in run.file.models:
        problem = f"is {model!r}, which is not served" if model else "is missing, and several are served"
        raise ConfigError("--model", f"{problem}: {', '.join(run.file.models)}")
    return _known(run, run.file.nats), model_namespace(namespace, model)


async def reach(place: str, timeout_s: float, problem: str, flag: str) -> None:
    """Connects to HOST:PORT once, because clients of gRPC and NATS take seconds to tell that nobody listens. Raises
    UnavailableError, which begins with `problem`; ConfigError when `place` is no address."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*parse_address(place)), timeout_s)
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"{problem}: {WAY_OUT.format(flag=flag)}") from error
    except ValueError as error:
        raise ConfigError(flag, str(error)) from error
    writer.close()


def _known(run: Run, place: str) -> str:
    if not place:
        raise UnavailableError(f"the service {run} is still starting")
    return place
