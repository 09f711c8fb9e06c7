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
OWN_NAMES = re.compile(r"(prefill|decode|workers|router)-\d+|nats")  # of the processes that we name ourselves


class ExternalWorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    name: WorkerName  # of the worker, in discovery and wherever workers are named
    address: Text  # http://HOST:PORT of `vllm serve`
    events: Text  # tcp://HOST:PORT: `endpoint` of its --kv-events-config
    replay: Text  # tcp://HOST:PORT: `replay_endpoint` of the same
    api_key_file: Text | None = None  # the key that it asks for (its --api-key)
    ca_file: Text | None = None  # who has signed its certificate, where those that this machine trusts have not
    model: Text | None = None  # its name for the model; None: ours
    role: Literal["prefill", "decode", "both"] = "both"  # what it does of a request: prompts for servers with `decode`,
    # answers behind prompts of servers with `prefill`, or all of it

    def __post_init__(self) -> None:
        if OWN_NAMES.fullmatch(self.name):
            raise ValueError(f"name is {self.name}, which `baton up` gives to a process of its own: choose another one")
        _check("address", self.address, ("http", "https"))
        _check("events", self.events, ("tcp", "ipc"))
        _check("replay", self.replay, ("tcp", "ipc"))

    @property
    def worker_role(self) -> Literal["prefill", "decode"]:
        """The role of its worker."""
        return "prefill" if self.role == "prefill" else "decode"

    @property
    def where(self) -> str:
        """The name of the worker in errors."""
        return f"external_workers.{self.name}"


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
