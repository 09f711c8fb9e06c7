"""serving.yaml: every key with its default and meaning. Each process parses it once and refuses unknown keys.

The file `serving.yaml` at the top of the repository documents the same keys; a test keeps the two equal.
"""

import functools
import operator
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta, Struct

from baton_proto.planner import PREFILL, ROLES, Role
from runtime.config.external import ExternalWorkerConfig, check_names
from runtime.config.planner import PlannerConfig
from runtime.config.refusal import refusal
from runtime.config.step_times import StepTimes
from runtime.config.types import (
    AutoPositive,
    BlockSize,
    Count,
    Namespace,
    NatsUrl,
    Port,
    Positive,
    Seconds,
    Share,
    Size,
    Text,
    Threads,
    Weight,
    in_order,
)
from runtime.config.workers import WorkerEngine, WorkersConfig
from runtime.config.yaml_file import read_yaml
from runtime.errors import ConfigError, nearest


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    url: NatsUrl | None = None  # None: `baton up` starts its own server
    store_dir: Text | None = None  # of the own server; None: a temporary folder
    credentials_file: Text | None = None  # .creds, for the server at `url`
    token_file: Text | None = None  # or a token


class PlacementConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request costs is in ms: the time until its first token and what it costs others, see serving.yaml."""

    ship_ms: Weight = 2.0  # of a prompt's way from prefill to decode worker, however short
    # An 8B model on an H200: 147 kB a token, over links of 50, 50 and 2.5 GB/s
    ship_token_ms: Weight = 0.003
    host_token_ms: Weight = 0.003
    disk_token_ms: Weight = 0.06
    decode_steps: Weight = 8.0  # of the worker that the request is charged with
    delay_weight: Weight = 0.25  # of a ms that a prompt delays another request's tokens
    crowd_weight: Weight = 4.0  # of the ms that later prompts wait because this one is not cached
    temperature: Weight = 0.0  # 0: argmin with random ties; above: softmax over negative normalised costs
    local_prefill_tokens: Count = 2**31 - 1  # that a decode worker may compute of a prompt; 0: all prompts are shipped
    prefill_queue_tokens: Positive = 131_072  # a prefill worker with as many queued tokens gets no new request
    charge_ttl_s: Seconds = 300.0  # a charge that nobody released is dropped after this long
    expected_prefix_ttl_s: Weight = (
        30.0  # how long a prompt that was sent is taken for cached without an event; 0: never
    )


class ChargeSharingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How routers tell each other which worker they have sent what."""

    interval_s: Seconds = 0.005  # between two messages, at least
    ttl_s: Seconds = 3.0  # a router that is silent for this long loses its charges

    def __post_init__(self) -> None:
        in_order("interval_s", self.interval_s, "ttl_s", self.ttl_s)


ToolParser = Literal[
    "auto", "none", "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "harmony"
]
ReasoningParser = Literal["auto", "none", "think", "mistral", "harmony"]


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: Text = "127.0.0.1"
    http_port: Port = 8000  # 0 picks a free one
    grpc_port: Port = 8001
    queue_limit: Positive = 1024  # requests admitted and not finished, beyond which new ones are refused
    max_running_per_worker: Positive = 256  # requests in flight on one decode worker; more wait in the queue
    request_timeout_s: Seconds = 600.0  # when the caller names no deadline
    reject_ttft_ms: Weight = 0.0  # a request whose first token is expected later is refused; 0: no such limit
    no_worker_timeout_s: Seconds = 5.0  # how long a request waits for a worker to appear
    max_attempts: Positive = 4  # replays after lost workers, the first attempt included
    max_body_bytes: Positive = 8 * 1024 * 1024
    max_buffered_bytes: Positive = 256 * 1024 * 1024  # of all HTTP bodies at once; see serving.yaml
    max_http_connections: Positive = 4096  # open at once, of gRPC as many more; see serving.yaml
    max_priority: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # of callers whose key's line says nothing else
    max_keep_cache_s: Annotated[float, Meta(ge=0, le=7 * 86400)] = 3600.0  # that requests may ask for; 0: none
    response_store_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 64 * 1024 * 1024  # of kept responses; 0: none are
    response_ttl_s: Seconds = 3600.0  # how long a response is kept
    generation_config: Text = (
        "auto"  # auto: the model's file says how to sample; none: it does not; or a folder with one
    )
    unknown_fields: Literal["refuse", "ignore"] = "refuse"  # of HTTP bodies, which other servers of the API ignore
    tool_parser: ToolParser = "auto"  # auto: by the model's chat template and tokens
    reasoning_parser: ReasoningParser = "auto"
    parse_control_tokens: bool = False  # True: a message that spells out a control token forges it
    ui: bool = True  # the live page at /ui
    cors_origins: tuple[Text, ...] = ()  # of web pages that may call the HTTP API; "*": all
    placement: PlacementConfig = PlacementConfig()
    charge_sharing: ChargeSharingConfig = ChargeSharingConfig()

    def __post_init__(self) -> None:
        if self.http_port == self.grpc_port != 0:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}: one of them must be another, or 0")


class DiskKvConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A disk tier for KV blocks, below the host tier. Each worker has a part of the folder, and finds it again."""

    folder: Text | None = None  # None: there is no such tier
    size: Size = "100GiB"  # of each worker's files, at most


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults are those of a CPU. `baton up` replaces those of AUTO_KEYS where it starts workers on GPUs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # auto: float32 on CPU; on GPU the model's own, or bfloat16
    )
    attention: Literal["auto", "torch", "triton", "flash"] = "auto"
    block_size: BlockSize = 16  # tokens per KV block
    kv_memory: Size = "auto"  # KV slab, per GPU, in whole blocks; auto: 512 MiB on CPU, what is left on a GPU
    host_kv_memory: Size = (
        "0"  # per rank, for prefixes that leave the slab; auto: 4 slabs, at most half of what is free; not on GPU ranks
    )
    disk_kv: DiskKvConfig = DiskKvConfig()
    tensor_parallel: Literal[1, 2, 4, 8] = 1  # GPUs of one worker (on CPU: processes), each with a part of the model
    gpu_share: Positive = 1  # workers that share one GPU: kv_memory auto takes as small a part of it
    max_model_len: Positive | None = None  # None: what the model and the pool allow
    max_batch_tokens: AutoPositive = 512  # token budget of one step (chunked prefill)
    prefill_batch_tokens: AutoPositive | None = None  # of a prefill worker, where nobody decodes; None: the same
    prefill_tensor_parallel: Literal[1, 2, 4, 8] | None = None  # of a prefill worker; None: tensor_parallel
    max_running: AutoPositive = 64  # sequences that decode together
    cuda_graphs: bool = True  # False: a GPU worker starts sooner, and its steps take longer
    gpu_memory_share: Share = 0.97  # of a GPU, which may be in use, whoever uses it
    cache_salt: Text | None = None  # makes the hashes of KV blocks this service's own
    cache_per_tenant: bool = False  # requests of different tenants share no cached prefixes
    prepare_sleep: bool = False  # a GPU worker takes the host memory for sleep level 1 at its start
    threads: Threads = 0  # torch CPU threads; 0: cores / workers of this machine, at least 1


class MockConfig(StepTimes, frozen=True, forbid_unknown_fields=True):
    """With `model: mock`: how long a step takes, and what a worker pretends to have."""

    speed_up: Annotated[float, Meta(gt=0, le=1e9)] = 1.0  # all times are divided by it
    kv_blocks: Positive = 32768  # per worker
    answer_tokens: Positive = 64  # an answer ends by itself after as many tokens
    tokenizer: Text = "bytes"  # `bytes`: one token per byte; else what `model` takes, for its tokenizer alone


class TransferConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # auto: the first row of kvtransfer/transports/table.py that both workers can use; else the name of a row. Workers
    # and `baton up` check it, because this file lies below the table
    transport: Text = "auto"
    lease_ttl_s: Seconds = 120.0  # a grant that was not committed by then is cancelled and quarantined
    connect_timeout_s: Seconds = 5.0
    checksum: bool = False  # xxh3 of every block, sent along and verified before a sequence is admitted


class DiscoveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    heartbeat_s: Seconds = 1.0
    ttl_s: Seconds = 4.0  # a worker that was silent for this long is gone

    def __post_init__(self) -> None:
        in_order("heartbeat_s", self.heartbeat_s, "ttl_s", self.ttl_s)


class SecurityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of files, because no key stands in a configuration. runtime/security/keys.py lists the variables that may
    hold keys instead."""

    api_key_file: Text | None = None  # one key per line; the public ports and the metrics take each key
    insecure: bool = False  # True: without a key of clients, the router may listen beyond the loopback interface
    tls_cert_file: Text | None = None  # of the public ports: PEM, with the chain up to the CA
    tls_key_file: Text | None = None
    cluster_key_file: Text | None = None  # of the service's own processes
    operator_key_file: Text | None = None  # one key per line; Admin and the planner's orders take each key
    # TLS between the service's own processes. auto: on when they listen beyond the loopback interface
    internal_tls: Literal["auto", "on", "off"] = "auto"


class RayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `baton up --ray`."""

    capacity_timeout_s: Seconds = 120.0  # a worker that no node has room for is given up after this long


class LoggingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class TracesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenTelemetry. Variables OTEL_* say what is not said here."""

    enabled: bool = False
    endpoint: Text | None = None  # OTLP over HTTP; None: OTEL_EXPORTER_OTLP_ENDPOINT, else this machine's port 4318
    sample: Annotated[float, Meta(ge=0, le=1)] | None = None  # of requests whose caller has not decided; None: all


class TelemetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    traces: TracesConfig = TracesConfig()


class ServingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    model: Text = "smollm2"  # `smollm2`, a name on the Hub, a folder in Hugging Face form, a .gguf file, or `mock`
    served_model_name: Text | None = None  # None: the name, or that of the folder or file
    namespace: Namespace = "default"  # of NATS subjects, streams and buckets
    nats: NatsConfig = NatsConfig()
    router: RouterConfig = RouterConfig()
    workers: WorkersConfig = WorkersConfig()
    engine: EngineConfig = EngineConfig()
    vllm: dict[str, Any] = {}  # arguments of vLLM's engine, as `vllm serve` has them, with _ for -
    external_workers: tuple[ExternalWorkerConfig, ...] = ()  # engines that already run, as `vllm serve`
    mock: MockConfig = MockConfig()
    transfer: TransferConfig = TransferConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    security: SecurityConfig = SecurityConfig()
    planner: PlannerConfig = PlannerConfig()
    ray: RayConfig = RayConfig()
    logging: LoggingConfig = LoggingConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def __post_init__(self) -> None:
        check_names(self.external_workers)

    def external_worker(self, worker_id: str) -> ExternalWorkerConfig | None:
        """None: we start its engine."""
        return next((worker for worker in self.external_workers if worker.name == worker_id), None)

    def may_have(self, role: Role) -> bool:
        """Whether workers of the role start with the service, or a planner may add them."""
        limits = self.planner.limits
        most = limits.max_prefill if role == PREFILL else limits.max_decode
        return bool(self.workers.count(role) or (self.planner.enabled and most))

    def uses(self, engine: WorkerEngine) -> bool:
        """Whether any worker has this engine, or one that a planner adds."""
        roles = [role for role in ROLES if self.may_have(role) or not self.workers.total]
        return any(engine in self.workers.by_engine(role) for role in roles)


AUTO_KEYS = ("block_size", "max_batch_tokens", "prefill_batch_tokens", "max_running")
"""Keys of the section `engine` that may say `auto`, which is the same as leaving them out."""
GENERATION_CONFIGS = ("auto", "none")  # what is no folder
PATH_KEYS = {
    "engine.disk_kv": ("folder",),
    "nats": ("store_dir", "credentials_file", "token_file"),
    "planner": ("journal",),
    "workers": ("python",),
    "security": ("api_key_file", "tls_cert_file", "tls_key_file", "cluster_key_file", "operator_key_file"),
}


def load_config(path: Path | None) -> ServingConfig:
    """Reads serving.yaml (None: all defaults). Raises ConfigError naming the key and, if unknown, the nearest one."""
    return ServingConfig() if path is None else parse_config(read_yaml(path), str(path))


def parse_config(data: Any, where: str = "configuration") -> ServingConfig:
    """Checks plain data against the schema. Raises ConfigError that names `where` and the key."""
    _refuse_unknown_keys(data, ServingConfig, where, ())
    data = _with_words(data)
    try:
        return msgspec.convert(data, ServingConfig)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        path = place.strip("`").removeprefix("$.")
        told = refusal(data, ServingConfig, path, problem)
        raise ConfigError(f"{where}: {path or 'top level'}", told) from error


def _with_words(data: Any) -> Any:
    """YAML has read a bare `on` or `off` as a truth value, and a size of 0 as a number. `auto` is no number."""
    match data:
        case {"security": {"internal_tls": bool(wanted)} as security}:
            data = data | {"security": security | {"internal_tls": "on" if wanted else "off"}}
    match data:
        case {"engine": {"host_kv_memory": 0} as engine}:
            data = data | {"engine": engine | {"host_kv_memory": "0"}}
    match data:
        case {"engine": dict(engine)}:
            kept = {key: value for key, value in engine.items() if not (key in AUTO_KEYS and value == "auto")}
            data = data | {"engine": kept}
    return data


def with_absolute_paths(config: ServingConfig) -> ServingConfig:
    """The configuration for processes that work in another folder."""
    data = msgspec.to_builtins(config)
    for name, keys in PATH_KEYS.items():
        section = functools.reduce(operator.getitem, name.split("."), data)
        section |= {key: _absolute(path) for key in keys if (path := section[key]) is not None}
    for worker in data["external_workers"]:
        if worker["api_key_file"] is not None:
            worker["api_key_file"] = _absolute(worker["api_key_file"])
    data["workers"]["weights_folders"] = [_absolute(folder) for folder in config.workers.weights_folders]
    if Path(config.model).expanduser().exists():
        data["model"] = _absolute(config.model)
    if config.router.generation_config not in GENERATION_CONFIGS:
        data["router"]["generation_config"] = _absolute(config.router.generation_config)
    return parse_config(data)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def for_prefill_worker(config: ServingConfig) -> ServingConfig:
    """The configuration of a prefill worker: prefill_batch_tokens and prefill_tensor_parallel take effect."""
    engine = config.engine
    tokens = engine.prefill_batch_tokens or engine.max_batch_tokens
    ranks = engine.prefill_tensor_parallel or engine.tensor_parallel
    engine = msgspec.structs.replace(engine, max_batch_tokens=tokens, tensor_parallel=ranks)
    return msgspec.structs.replace(config, engine=engine)


def dump_config(config: ServingConfig) -> str:
    """The whole configuration as YAML, defaults included."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def _refuse_unknown_keys(data: Any, schema: type[Struct], where: str, path: tuple[str, ...]) -> None:
    if not isinstance(data, dict):
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(schema)}
    for key, value in data.items():
        at = ".".join((*path, str(key)))
        if key not in fields:
            near = nearest(str(key), fields, "one", "".join(f"{part}." for part in path))
            raise ConfigError(f"{where}: {at}", f"unknown key{near or '; serving.yaml has all'}")
        inner = fields[key]
        sections = [kind for kind in (inner, *get_args(inner)) if isinstance(kind, type) and issubclass(kind, Struct)]
        if sections and get_origin(inner) is not tuple:
            _refuse_unknown_keys(value, sections[0], where, (*path, str(key)))
        elif inner == tuple[ExternalWorkerConfig, ...] and isinstance(value, list):
            for number, item in enumerate(value):
                _refuse_unknown_keys(item, ExternalWorkerConfig, where, (*path, f"{key}[{number}]"))
        elif get_origin(inner) is dict and isinstance(value, dict):
            for name in value:
                if not isinstance(name, str):
                    raise ConfigError(f"{where}: {at}", f"{name!r} is not a name: keys are text")


def parse_bytes(text: str, where: str) -> int:
    """'512MiB' -> 536870912. Units: B, KiB, MiB, GiB, KB, MB, GB. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|B|)", text.strip())
    if not match:
        raise ConfigError(where, f"{text!r} is not a size such as 512MiB")
    number, unit = match.groups()
    size = float(number) * (1024 if "i" in unit else 1000) ** " KMG".index(unit.removesuffix("B")[:1] or " ")
    if size >= 2**63:
        raise ConfigError(where, f"{text[:20]}... is more than any machine has; a size is less than 2^63 bytes")
    return int(size)
