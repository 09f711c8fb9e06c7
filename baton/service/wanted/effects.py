"""What a change of each configuration key takes while the service runs. A key that no row names takes new processes of
all kinds, because any of them may read it."""

from collections.abc import Mapping, Set
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from baton_proto.planner import ROLES
from runtime.config.models import model_of
from runtime.config.paths import with_absolute_paths
from runtime.config.serving import ServingConfig

Kind = Literal["router", "prefill", "decode"]  # of a process, by who reads the key

RESTART: Final = "`baton down` and `baton up`, or a second service with --namespace"
MODELS: Final = "models["  # begins the name of a key that is one model's own: models[NAME].engine.max_running
SAME_FILE: Final = "put the new content into the file that is named: it is read again by itself"


class Effect(Struct, frozen=True):
    """`processes`: those that read the key at their start, and are replaced. `refusal`: why and what to do instead."""

    processes: frozenset[Kind] = frozenset()
    refusal: str = ""


ALL: Final = Effect(frozenset({"router", "prefill", "decode"}))
ROUTERS: Final = Effect(frozenset({"router"}))
WORKERS: Final = Effect(frozenset({"prefill", "decode"}))
PREFILL: Final = Effect(frozenset({"prefill"}))
IN_PLACE: Final = Effect()


def _refused(why: str, way: str = RESTART) -> Effect:
    return Effect(refusal=f"cannot change while the service runs: {why}. Way out: {way}")


ALL_KNOW: Final = _refused("all processes, old and new, know each other by it")
CLIENTS_KNOW: Final = _refused("clients know the service by it")

EFFECTS: Final[Mapping[str, Effect]] = {
    "model": ALL,
    "models": ROUTERS,  # and the workers of a model that comes or goes
    "served_model_name": IN_PLACE,  # the name is compared with the one that clients know: configuration.py
    "namespace": ALL_KNOW,
    "nats": ALL_KNOW,
    "router": ROUTERS,
    "router.host": CLIENTS_KNOW,
    "router.http_port": CLIENTS_KNOW,
    "router.grpc_port": CLIENTS_KNOW,
    "workers": WORKERS,
    "workers.host": ALL_KNOW,
    "workers.prefill": IN_PLACE,  # workers are started and ended
    "workers.decode": IN_PLACE,
    "workers.ready_timeout_s": IN_PLACE,  # the supervisor waits
    "workers.drain_timeout_s": ALL,
    "engine": WORKERS,
    "engine.block_size": _refused("routers and workers count in blocks of this size"),
    "engine.device": _refused("places for workers were counted at the start"),
    "engine.prefill_tensor_parallel": PREFILL,
    "engine.max_model_len": ALL,
    "engine.cache_salt": ROUTERS,
    "engine.cache_per_tenant": ROUTERS,
    "vllm": WORKERS,
    "external_workers": ROUTERS,  # and their own processes, whose section it is
    "mock": WORKERS,
    "mock.tokenizer": _refused("answers under way are of its tokens"),
    "transfer": WORKERS,
    "security.api_key_file": _refused("its keys are in use", SAME_FILE),
    "security.tls_cert_file": _refused("its certificate is in use", SAME_FILE),
    "security.tls_key_file": _refused("its key is in use", SAME_FILE),
    "security.cluster_key_file": ALL_KNOW,
    "security.operator_key_file": ALL_KNOW,
    "security.internal_tls": ALL_KNOW,
    "security.insecure": ROUTERS,
    "planner": IN_PLACE,  # the planner begins anew
    "planner.targets": ROUTERS,  # workers read them again
    "logging.level": IN_PLACE,
    "logging.usage": ROUTERS,
}


class Change(Struct, frozen=True):
    """A key whose value is another one."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.key.endswith("engine.cache_salt"):  # a secret
            return self.key
        return f"{self.key} {_shown(self.before)} -> {_shown(self.after)}"


def effect_of(key: str) -> Effect:
    """The row of the key, or of the section that it lies in. A model's own key has the effect of the service's."""
    if key.startswith(MODELS):
        own = key.partition("].")[2]
        shared = own.partition(".")[0] in ("model", "engine", "external_workers")
        key = own if shared else f"workers.{own}" if own in ROLES else "models"
    while key not in EFFECTS:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return ALL
    return EFFECTS[key]


def changes(before: ServingConfig, after: ServingConfig) -> list[Change]:
    """In the order of the keys in serving.yaml; then those of each model, or its name where one of both lacks it."""
    both = {model.name for model in before.models} & {model.name for model in after.models}
    old, new = _flat(before, both), _flat(after, both)
    return [Change(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]


def changes_for(kind: Kind, before: ServingConfig, after: ServingConfig) -> list[Change]:
    """Those that a process of this kind reads at its start."""
    return [change for change in changes(before, after) if kind in effect_of(change.key).processes]


def _flat(config: ServingConfig, whole: Set[str]) -> dict[str, Any]:
    """`whole`: the models whose own keys are told."""
    flat: dict[str, Any] = {}

    def add(prefix: str, section: Mapping[str, Any]) -> None:
        for key, value in section.items():
            name = prefix + key
            if isinstance(value, dict) and key not in ("prefill", "decode"):
                add(f"{name}.", value)
            else:
                flat[name] = value

    config = with_absolute_paths(config)
    add("", msgspec.to_builtins(msgspec.structs.replace(config, models=())))
    for model in config.models:
        name = f"{MODELS}{model.name}]"
        if model.name not in whole:
            flat[name] = model.model
        else:
            engine = msgspec.to_builtins(model_of(config, model).engine)  # with the keys that it shares
            add(f"{name}.", msgspec.to_builtins(msgspec.structs.replace(model, engine=engine)))
    return flat


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
