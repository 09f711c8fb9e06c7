"""The table of scenarios: which processes serve while faults strike them."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from runtime.config.step_times import StepTimes
from tests.chaos.machine.hosts import why_no_namespaces
from tests.chaos.machine.preload import why_no_preload
from tests.vllm.environment import vllm_python

Engine = Literal["tiny", "mock", "vllm"]
Device = Literal["cpu", "cuda"]
Network = Literal["none", "wires", "namespaces"]
STRETCH = 40  # consecutive rounds that share one scenario, and with it the running processes

# Prompts take several engine steps, and a pool of 256 blocks is short enough for evictions and preemptions. Prefixes
# move between it, the small host tier and the small disk tier all the time.
TINY = {
    "engine": {"device": "cpu", "threads": 1, "kv_memory": "4MiB", "host_kv_memory": "2MiB", "max_batch_tokens": 64}
}
MOCK = {
    "step_times": msgspec.to_builtins(StepTimes().faster(20)),
    "mock": {"kv_blocks": 256, "answer_tokens": 1000},
    "engine": {"device": "cpu", "threads": 1},
}
# A worker takes half a minute to start, and more when others start too.
VLLM: dict[str, Any] = {
    "workers": {"engine": "vllm", "python": str(vllm_python()), "ready_timeout_s": 300.0},
    "engine": {"threads": 1, "block_size": 32, "kv_memory": "8MiB", "max_batch_tokens": 128, "max_model_len": 2048},
}
OF_ENGINE: dict[Engine, dict[str, Any]] = {"tiny": TINY, "mock": MOCK, "vllm": VLLM}
# Several workers share one GPU. Only in float32 is the order of a sum too small a thing to change an answer.
ON_ONE_GPU = {"engine": {"device": "cuda", "dtype": "float32", "attention": "triton", "gpu_share": 8}}
BETWEEN_GPUS = {"shm": "cuda_ipc", "tcp": "tcp"}
PLAIN: dict[str, Any] = {"security": {"internal_tls": "off"}}
SECURED: dict[str, Any] = {"security": {"internal_tls": "on"}}
RANKS = {"engine": {"tensor_parallel": 2, "prefill_tensor_parallel": 1}}
USUAL = {"engine": {"kv_memory": "64MiB", "max_batch_tokens": 256}}  # as by default, but for a small machine
ROUTERS = ("kill router", "routers killed", "routers frozen")
NATS = ("NATS killed", "NATS lost its storage", "NATS stopped", "NATS streams deleted")
ROLL_OUT = "roll out"
KV = "kv"  # the disk tier, in the folder of a fleet's disk
SHIP = {"router": {"placement": {"local_prefill_tokens": 0}}}  # every prompt runs on a prefill worker


def merged(*sections: dict[str, Any]) -> dict[str, Any]:
    """Later ones win, key by key."""
    result: dict[str, Any] = {}
    for section in sections:
        for key, value in section.items():
            known = result.get(key)
            result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


@dataclass(frozen=True, slots=True)
class Scenario:
    """`prefill`, `decode`, `routers`: numbers of processes. `hosts`: that the processes are spread over.
    `network`: what is between the hosts. `clocks`: the processes have clocks that can jump.
    `planner`: `baton up` has started the processes, and starts others in their place. Its routers share their ports.
    `own_nats`: servers that are its own; 0: one stands beside it. `mostly`: faults that are drawn ten times as often.
    `ray`: on a Ray cluster. `rolls`: its workers change to the next generation, with other weights, and back.
    `hostile`: strangers attack it, and nothing else strikes. `keys`: callers need keys; there are an honest one and a
    stranger's. `models`: the names of several, each of which has so many workers; empty: there is one. `asleep`: they
    sleep until they are asked for. `overrides`: sections of serving.yaml."""

    name: str
    prefill: int
    decode: int
    routers: int = 1
    engine: Engine = "tiny"
    hosts: int = 1
    network: Network = "none"
    clocks: bool = False
    planner: bool = False
    own_nats: int = 0
    mostly: tuple[str, ...] = ()
    ray: bool = False
    rolls: bool = False
    hostile: bool = False
    keys: bool = False
    models: tuple[str, ...] = ()
    asleep: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def secured(self) -> bool:
        """The processes speak TLS to each other and to NATS."""
        return self.overrides.get("security") == SECURED["security"]

    @property
    def shares_ports(self) -> bool:
        """Clients cannot tell which router they ask."""
        return self.planner and self.routers > 1

    @property
    def start_s(self) -> float:
        """How long a worker may take to start, and the service to be whole again."""
        return 300.0 if self.engine == "vllm" else 180.0 if self.rolls else 60.0

    @property
    def has_disk(self) -> bool:
        """Whether its workers have a disk tier, on a CPU."""
        plain = self.engine == "tiny" and not self.hostile
        return plain and "tensor_parallel" not in self.overrides.get("engine", {})

    @property
    def asks_s(self) -> tuple[float, float]:
        """When the requests of a round begin: of a hostile one after strangers have begun."""
        return (0.2, 2.5) if self.hostile else (0.0, 0.5)

    def sections(self, device: Device, folder: Path) -> dict[str, Any]:
        """Sections of serving.yaml. folder: for the disk tier."""
        if self.engine != "tiny" or device == "cpu":
            disk = {"engine": {"disk_kv": {"folder": str(folder / KV), "size": "4MiB"}}} if self.has_disk else {}
            return merged(OF_ENGINE[self.engine], disk, self.overrides)
        on_gpu = merged(TINY, self.overrides, ON_ONE_GPU)
        transfer = on_gpu.get("transfer", {})
        return on_gpu | {"transfer": transfer | {"transport": BETWEEN_GPUS.get(transfer.get("transport"), "auto")}}


def _transport(name: str, lease_ttl_s: float = 8.0) -> dict[str, Any]:
    return SHIP | {"transfer": {"transport": name, "lease_ttl_s": lease_ttl_s, "checksum": True}}


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("shm", 2, 2, overrides=_transport("shm")),
    Scenario("tcp", 2, 2, overrides=_transport("tcp")),
    Scenario("tls", 2, 2, routers=2, overrides=_transport("tcp") | SECURED),
    Scenario("two-routers", 1, 2, routers=2, overrides=_transport("shm")),
    Scenario("three-models", 1, 2, routers=2, models=("one", "two", "three"), overrides=_transport("shm")),
    Scenario(
        "sleeping-models",
        *(1, 2, 2),
        models=("one", "two", "three"),
        asleep=True,
        overrides=_transport("shm") | {"planner": {"limits": {"gpu_budget": 6}}},  # room for two of them
    ),
    Scenario("mock", 2, 3, routers=2, engine="mock", overrides=_transport("tcp")),
    Scenario("decode-only", 0, 3),
    Scenario("clocks", 2, 2, clocks=True, overrides=_transport("tcp")),
    Scenario("three-hosts", 2, 2, hosts=3, network="wires", overrides=_transport("tcp")),
    Scenario("namespaces", 2, 2, hosts=3, network="namespaces", overrides=_transport("tcp") | PLAIN),
    Scenario("ranks", 1, 2, overrides=_transport("shm") | RANKS),
    Scenario("vllm-shm", 1, 2, engine="vllm", overrides=_transport("shm", lease_ttl_s=30.0)),
    Scenario("vllm-tcp", 1, 2, engine="vllm", overrides=_transport("tcp", lease_ttl_s=30.0)),
    Scenario("planner", 1, 2, engine="mock", planner=True, overrides=_transport("tcp")),
    Scenario("routers", 1, 2, routers=2, engine="mock", planner=True, mostly=ROUTERS, overrides=_transport("tcp")),
    Scenario(
        "upgrades",
        *(1, 2, 2),
        engine="mock",
        planner=True,
        mostly=(ROLL_OUT, "kill", "kill router"),
        overrides=_transport("tcp"),
    ),
    Scenario("nats", 1, 2, engine="mock", planner=True, own_nats=1, mostly=NATS, overrides=_transport("tcp")),
    Scenario(
        "nats-cluster",
        *(1, 2, 2),
        engine="mock",
        planner=True,
        own_nats=3,
        mostly=(*NATS, *ROUTERS),
        overrides=_transport("tcp") | SECURED,
    ),
    Scenario("ray", 1, 2, engine="mock", planner=True, ray=True, overrides=_transport("tcp")),
    Scenario("rollout", 1, 2, routers=2, rolls=True, overrides=_transport("shm")),
    Scenario("hostile", 1, 1, hostile=True, keys=True, overrides=USUAL),
    Scenario("hostile-open", 1, 1, hostile=True, overrides=USUAL),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def scenario_of(number: int, names: tuple[str, ...]) -> Scenario:
    """The scenario of a round, when those of `names` take turns of STRETCH rounds."""
    return BY_NAME[names[number // STRETCH % len(names)]]


def why_not(scenario: Scenario, device: Device = "cpu") -> str:
    """Why the scenario cannot run on this machine; empty when it can."""
    if device == "cuda" and "tensor_parallel" in scenario.overrides.get("engine", {}):
        return "ranks need a GPU each, and all workers share one"
    if scenario.engine == "vllm" and (vllm_python() is None or device == "cuda"):
        return (
            "vLLM's workers share KV on CPUs alone" if device == "cuda" else "no environment with vLLM: make vllm-env"
        )
    if scenario.ray and not importlib.util.find_spec("ray"):
        return "Ray is not installed"
    if scenario.network == "namespaces" and (why := why_no_namespaces()):
        return why
    return why_no_preload() if scenario.clocks or scenario.network == "wires" else ""
