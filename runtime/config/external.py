"""The section `external_workers` of serving.yaml: engines that somebody else starts, as `vllm serve`."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from runtime.config.types import Text

WorkerName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z", description="a name of up to 64 letters, digits, - and _")
]
OWN_NAMES = re.compile(r"(prefill|decode|workers|router)-\d+|nats|.*-dp\d+")  # of what we name ourselves
RANK = re.compile(r"-dp\d+\Z")


class ExternalWorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    name: WorkerName  # of the worker, in discovery and wherever workers are named; those of several ranks end in -dpN
    address: Text  # http://HOST:PORT of `vllm serve`
    events: Text | None = None  # tcp://HOST:PORT: `endpoint` of its --kv-events-config; None: it generates no text
    replay: Text | None = None  # tcp://HOST:PORT: `replay_endpoint` of the same
    api_key_file: Text | None = None  # the key that it asks for (its --api-key)
    ca_file: Text | None = None  # who has signed its certificate, where those that this machine trusts have not
    model: Text | None = None  # its name for the model; None: ours
    role: Literal["prefill", "decode", "both"] = "both"  # what it does of a request: prompts for servers with `decode`,
    # answers behind prompts of servers with `prefill`, or all of it

    def __post_init__(self) -> None:
        if OWN_NAMES.fullmatch(self.name):
            problem = "which `baton up` gives to a process of its own, or to a rank: choose another one"
            raise ValueError(f"name is {self.name}, {problem}")
        _check("address", self.address, ("http", "https"))
        if self.events or self.replay:
            _check("events", self.events or "", ("tcp", "ipc"))
            _check("replay", self.replay or "", ("tcp", "ipc"))

    @property
    def worker_role(self) -> Literal["prefill", "decode"]:
        """The role of its worker."""
        return "prefill" if self.role == "prefill" else "decode"

    @property
    def where(self) -> str:
        """The name of the worker in errors."""
        return f"external_workers.{self.name}"


def rank_names(name: str, ranks: int) -> list[str]:
    """The workers of a server: one of its own name, or one for each rank that it has."""
    return [name] if ranks == 1 else [f"{name}-dp{rank}" for rank in range(ranks)]


def server_of(worker_id: str) -> str:
    """The name of the server that an external worker is a rank of, or all of."""
    return RANK.sub("", worker_id)


def _check(key: str, value: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(value)
        whole = parts.scheme in schemes and (parts.scheme == "ipc" or bool(parts.hostname and parts.port))
    except ValueError:  # of a port that is none
        whole = False
    if not whole:
        raise ValueError(f"{key} is {value!r}, not an address such as {schemes[0]}://HOST:PORT")


def check_names(workers: Sequence[ExternalWorkerConfig]) -> None:
    """Raises ValueError when two have the same name."""
    names = [worker.name for worker in workers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"external_workers: the name {name} is given twice: each worker needs one of its own")
