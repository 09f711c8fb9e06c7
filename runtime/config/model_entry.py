"""The section `models` of serving.yaml: each model of a service that serves several."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from runtime.config.external import ExternalWorkerConfig
from runtime.config.types import Positive, ReasoningParser, Seconds, Text, ToolParser, Workers
from runtime.config.workers import EngineCounts

MAX_NAMESPACE = 64  # characters, see Namespace
OWN_KINDS = ("prefill", "decode", "workers")  # what ids of our own begin with: decode-qwen-1

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}\Z"
NAME_IS = "a name of up to 128 letters, digits and . _ : / @ + -, with a letter or digit first"
ModelName = Annotated[str, Meta(pattern=NAME_PATTERN, description=NAME_IS)]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    name: ModelName  # that clients ask for
    model: Text  # as the key `model`
    aliases: tuple[ModelName, ...] = ()  # further names that clients may ask for
    prefill: Workers | EngineCounts | None = None  # as in `workers`; None: what stands there
    decode: Workers | EngineCounts | None = None
    engine: dict[str, Any] = {}  # keys of the section `engine` that are others for this model
    tool_parser: ToolParser | None = None  # as in `router`; None: what stands there
    reasoning_parser: ReasoningParser | None = None
    adapters: dict[ModelName, Text] = {}  # as the key `adapters`
    external_workers: tuple[ExternalWorkerConfig, ...] = ()
    weight: Positive = 1  # its share, beside the others', of router.queue_limit and planned GPUs
    asleep: Literal["never", "until_asked"] = "never"  # until_asked: it wakes for a request, and sleeps when it is idle
    idle_s: Seconds = 60.0  # without a request, until it falls asleep
    wake_timeout_s: Seconds = 30.0  # for which a request waits for it to wake
    priority: int = 0  # those of a lower one fall asleep first where another model needs their GPUs

    @property
    def sleeps(self) -> bool:
        return self.asleep == "until_asked"

    @property
    def slug(self) -> str:
        return slug_of(self.name)


def slug_of(name: str) -> str:
    """The name of a model as it stands in namespaces and in the ids of workers."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")


def model_namespace(service: str, model: str) -> str:
    """The namespace of one of several models: all that its workers tell stays in it."""
    return f"{service}--{slug_of(model)}"


def check_models(models: Sequence[ModelConfig], namespace: str) -> None:
    """Raises ValueError for names that two models would share, or that are too long."""
    if double := _double(name for model in models for name in (model.name, *model.aliases, *model.adapters)):
        raise ValueError(
            f"models: the name {double} is given twice: each name, alias and adapter needs to be another one"
        )
    if double := _double(model.slug for model in models):
        raise ValueError(f"models: two names become {double} in the ids of workers: give one of them another name")
    if kept := next((model.name for model in models if model.sleeps and model.external_workers), ""):
        raise ValueError(f"models: {kept} has external workers, which do not sleep: leave out `asleep`")
    servers = [worker.name for model in models for worker in model.external_workers]
    if double := _double(servers):
        raise ValueError(f"models: the external worker {double} is named twice: each needs a name of its own")
    ours = {f"{kind}-{model.slug}-" for kind in OWN_KINDS for model in models}
    if taken := [name for name in servers if name.rstrip("0123456789") in ours]:
        raise ValueError(f"models: {taken[0]} is a name that a worker of ours may get: give the external one another")
    for model in models:
        if len(model_namespace(namespace, model.name)) > MAX_NAMESPACE:
            most = MAX_NAMESPACE - len(namespace) - 2
            raise ValueError(f"models: {model.name} has more than {most} characters: shorten it, or the namespace")


def _double(names: Iterable[str]) -> str:
    return next((name for name, count in Counter(names).items() if count > 1), "")
