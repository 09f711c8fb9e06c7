"""serving.yaml: every key, with its default and a comment above it. Each process parses it once.

`baton config` prints the file with these comments (commented.py); no other place declares a key.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta, Struct

from baton_proto.planner import PREFILL, ROLES, Role
from runtime.config.external import ExternalWorkerConfig, check_names
from runtime.config.left import told_of
from runtime.config.model_entry import ModelConfig, ModelName, check_models
from runtime.config.planner import PlannerConfig, TargetsConfig
from runtime.config.refusal import refusal
from runtime.config.step_times import StepTimes
from runtime.config.surroundings import LoggingConfig, NatsConfig, SecurityConfig
from runtime.config.types import (
    AutoPositive,
    BlockSize,
    Count,
    HostPattern,
    Namespace,
    Port,
    Positive,
    ReasoningParser,
    Seconds,
    Share,
    Size,
    Text,
    Threads,
    ToolParser,
    Weight,
)
from runtime.config.workers import WorkerEngine, WorkersConfig
from runtime.config.yaml_file import read_yaml
from runtime.errors import ConfigError, nearest


class PlacementConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The choices of an operator. The weights of the costs are in router/placement/weights.py."""

    # Beside prefill workers so many tokens of a prompt at most are computed where its answer is. 0: all prompts are
    # shipped.
    local_prefill_tokens: Count = 2**31 - 1


BODIES_AT_ONCE: Final = 32  # of the largest that one request may have


class RouterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # Address that the router listens on. 127.0.0.1 is reachable from this machine only; another one wants keys of
    # clients (security.api_key_file), or security.insecure.
    host: Text = "127.0.0.1"
    # OpenAI API, /health, /ready and /metrics. 0 picks a free port.
    http_port: Port = 8000
    # baton.v1.Inference. 0 picks a free port.
    grpc_port: Port = 8001
    # Routers that `baton up` starts, each a process with a tree of its own. They share both ports; while one that has
    # ended is started again, the others answer. What is said here of a router holds for each.
    replicas: Annotated[int, Meta(ge=1, le=64)] = 1
    # Requests that are admitted and not finished; beyond that the least entitled one is refused with 429 or
    # RESOURCE_EXHAUSTED, and told when to come back. Should be well above what the workers can run. Those that wait go
    # by priority, then by turns between tenants (tenant= in the line of a caller's API key).
    queue_limit: Positive = 1024
    # Requests in flight on one decode worker. More of them wait in the router's queue.
    max_running_per_worker: Positive = 256
    # Seconds that a request may take when its caller names no deadline.
    request_timeout_s: Seconds = 600.0
    # A request whose first token is expected after so many milliseconds is refused at once. 0: only what its own
    # deadline does not allow.
    reject_ttft_ms: Weight = 0.0
    # After SIGTERM, seconds for which the router serves on while /ready says 503, gRPC's health NOT_SERVING, and each
    # answer over HTTP closes its connection: as long as a load balancer takes to notice. Then new requests get 503.
    drain_window_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    # Seconds that a request waits for a worker to appear when there is none.
    no_worker_timeout_s: Seconds = 5.0
    # Largest HTTP body or gRPC message. 32 times as many bytes of all HTTP requests are in memory at once: bodies, and
    # what is decoded of them until they are tokens; the first 64 KiB of each do not count. Beyond it a long body is
    # refused with 503. A tenant holds at most three times what is free, so that one alone takes three quarters and none
    # takes all. As many bytes again are for gRPC messages, until they are decoded; beyond it one that takes longer than
    # a second is refused.
    max_body_bytes: Positive = 8 * 1024 * 1024
    # Hosts from which the router fetches images that requests have by address: HOST, or HOST:PORT for another port than
    # 80 and 443. *.DOMAIN, and * for all, mean public addresses alone; inside a network a host must be named itself.
    # []: none, such requests are refused.
    image_hosts: tuple[HostPattern, ...] = ()
    # Highest priority that a request may have; max_priority= in the line of a caller's key goes before it.
    max_priority: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    # Memory for the conversations of /v1/responses, which `previous_response_id` goes on from: they are kept for an
    # hour at most, and lie here from the time that their answer begins. When it is full, the tenant that has most here
    # loses its oldest. NATS keeps them, too, so that each router, and a later one, goes on from all. 0: none are kept,
    # and requests that rely on it are refused.
    response_store_bytes: Annotated[int, Meta(ge=0, le=2**40)] = 64 * 1024 * 1024
    # Folder for /v1/files and /v1/batches, which all routers of the service share: prompts and answers in plain. It is
    # made when it is missing; one that others may read is refused. Lines of batches have the lowest priority, and half
    # of what the workers can run at most. null: these paths are refused.
    batch_folder: Text | None = None
    # How to sample where a request does not say. auto: as the model's generation_config.json says (temperature, top_p,
    # top_k, min_p, repetition_penalty, max_new_tokens), else as OpenAI's API does. none: as OpenAI's API does. A
    # folder: as the generation_config.json in it says.
    generation_config: Text = "auto"
    # What to do with a field of an HTTP body that nobody here knows: refuse the request and name the nearest known
    # field, or ignore the field, as other servers of this API do.
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    # How the model writes calls of tools: hermes (Qwen too), qwen3_coder, llama3_json, pythonic, mistral, deepseek_v3
    # or harmony (gpt-oss). auto: as its chat template and its tokens say; hermes where the template knows no tools,
    # which the prompt then tells as text. none: requests with tools are refused.
    tool_parser: ToolParser = "auto"
    # How it marks reasoning, which answers tell apart: think (<think>), mistral ([THINK]) or harmony. none: it is text.
    reasoning_parser: ReasoningParser = "auto"
    # Control tokens of the model, such as <|im_end|>, that are spelled out in a chat's messages or tools. false: they
    # are read as the characters that they are, so no text of a user or of a tool can end its turn and forge another.
    # true: they are read as control tokens, as other servers do. Prompts of /v1/completions are not looked at.
    parse_control_tokens: bool = False
    # The live page at /ui, for who has an operator key. false: there is none.
    ui: bool = True
    # Web pages that browsers let call the HTTP API, as origins: ["https://chat.example.org"], or ["*"] for all. Callers
    # need an API key as ever, where the service asks for one; where it does not, other pages are refused.
    cors_origins: tuple[Text, ...] = ()

    # Which worker gets a request: the one that costs least, in ms (`baton events explain` shows the sum):
    #   queued prompts, or until there is room for its KV + computing what is not cached + 8 * decode step
    #   + loading from lower tiers
    #   + what it costs others
    # Each worker's times follow from its own steps; until it has reported some, from `step_times`. A decode worker
    # beside prefill workers runs a prompt itself or has it shipped, or a prefill worker keeps the answer, whichever
    # costs less.
    placement: PlacementConfig = PlacementConfig()

    @property
    def max_buffered_bytes(self) -> int:
        """Of all bodies at once."""
        return BODIES_AT_ONCE * self.max_body_bytes

    def __post_init__(self) -> None:
        if self.http_port == self.grpc_port != 0:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}: one of them must be another, or 0")


class DiskKvConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A disk tier for KV blocks, below the host tier. Each worker has a part of the folder, and finds it again."""

    # A folder on a local disk. Each worker takes a part of it. It is made when it is missing; one that others may write
    # is refused. null: no such tier.
    folder: Text | None = None
    # Of each worker's files, all its ranks' together, at most; more than the disk has for all workers is refused.
    # Useful from the size of KV blocks and host memory together upwards.
    size: Size = "100GiB"


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults are those of a CPU. `baton up` replaces those of AUTO_KEYS where it starts workers on GPUs."""

    # auto, cpu or cuda.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # auto (float32 on a CPU; on a GPU the model's own, but bfloat16 for a float32 model), float32, bfloat16, float16 or
    # fp8: projections in 8 bits, as the checkpoint has them or rounded row by row while it is read; all else in
    # bfloat16. A CPU computes with the same values in float32, a GPU before compute capability 8.9 in bfloat16.
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    # What keys and values are kept in: auto (what the model computes in), or fp8: 8 bits (e4m3 without scales), half of
    # bfloat16's bytes in memory, on the wire and in the tiers. Prompts are then attended to with Triton, not with
    # flash-attn. GPUs before compute capability 8.9 have no such numbers.
    kv_dtype: Literal["auto", "fp8"] = "auto"
    # auto, torch, triton or flash.
    attention: Literal["auto", "torch", "triton", "flash"] = "auto"
    # Tokens per KV block: 16, 32, 64 or 128. On a GPU 64 is fastest: decode attention 1-5 %, prefill attention 15 %
    # faster than with 16 (benchmarks/README.md); smaller blocks share prefixes in finer steps. auto: what a server of
    # external_workers has that answers, else 64 where `baton up` starts workers on GPUs, else 16. It prints what it
    # chose. Processes that are started by hand take `auto` as on a CPU, so that they agree: give them numbers.
    block_size: BlockSize = 16
    # Memory for KV blocks, per worker (with tensor_parallel, on each of its GPUs): B, KB, MB, GB, KiB, MiB or GiB. On a
    # CPU it is taken when it is first used. auto: 512 MiB on a CPU; on a GPU what weights and the largest step leave of
    # it, or of the worker's share of it. `baton up` refuses more than is free for all workers, and less than serves a
    # request.
    kv_memory: Size = "auto"
    # Host memory of each worker (with tensor_parallel, of each of its ranks) for prefixes that its KV blocks have no
    # room for, in the same units: they are copied back when a prompt begins with them, which is sooner than computing
    # them again. auto: four times the KV blocks, but at most half of what is free (in a container, of what its limit
    # leaves), shared among the workers. 0: none. A GPU worker pins it when it starts.
    host_kv_memory: Size = "0"
    # A disk tier below the host tier, which needs one. What prefixes the host memory has no room for is written to the
    # folder and read again when a prompt begins with it, where that is sooner than computing it. A worker that starts
    # again finds what it wrote, if it has the same model. The files hold the prompts in plain: only their owner can
    # read them.
    disk_kv: DiskKvConfig = DiskKvConfig()
    # GPUs that one worker takes: 1, 2, 4 or 8. Each holds a part of every layer, so that a step takes less time and
    # larger models and pools fit. They must be on one host. On a CPU as many processes share the work, which is of use
    # in tests.
    tensor_parallel: Literal[1, 2, 4, 8] = 1
    # Workers that share one GPU. `baton up` gives its workers one GPU after the other and counts by itself who shares.
    gpu_share: Positive = 1
    # Longest prompt and answer together, in tokens. null: what the model and the KV memory allow.
    max_model_len: Positive | None = None
    # Tokens that one engine step may compute at most: memory is kept for as many. How many it does compute follows from
    # planner.targets.itl_ms. auto: 8192, or what the model takes if that is less.
    max_batch_tokens: AutoPositive = 8192
    # GPUs that one prefill worker takes. KV blocks are shipped between workers of any of these sizes. null:
    # tensor_parallel.
    prefill_tensor_parallel: Literal[1, 2, 4, 8] | None = None
    # Sequences that decode together in one worker. auto: 256 on GPUs, else 64.
    max_running: AutoPositive = 64
    # How tokens are guessed, to compute several in one step: ngram (what followed the last ones before) or off. Answers
    # do not depend on it.
    speculation: Literal["off", "ngram"] = "off"
    # Part of a GPU's memory that may be in use, by whomever: what is left of it beside the weights, the largest step
    # and other programs is for KV blocks.
    gpu_memory_share: Share = 0.97
    # A secret string makes the hashes that cached prefixes are found by this service's own, so nobody outside can
    # compute them. All routers of a service need the same one. null: Dynamo's hashes, which are public. Prefixes are
    # compared token by token in any case; what a secret hides is whether a prompt is cached, to those who do not send
    # it.
    cache_salt: Text | None = None
    # Whether only requests of the same tenant share cached prefixes. A request may also bring a `cache_salt` of its
    # own: then it shares prefixes with requests of the same one. Otherwise a quick first token tells that somebody sent
    # this prompt.
    cache_per_tenant: bool = False
    # CPU threads per worker. 0: the cores of this machine divided by its workers, at least 1.
    threads: Threads = 0

    def stored_dtype(self, computed: str) -> str:
        """What keys and values are kept in where the model computes in `computed`."""
        return "float8_e4m3fn" if self.kv_dtype == "fp8" else computed


class MockConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # KV blocks of each worker, instead of engine.kv_memory.
    kv_blocks: Positive = 32768
    # An answer ends by itself after as many tokens, unless the request ignores that.
    answer_tokens: Positive = 64
    # bytes (one token per byte of text), or the model whose tokenizer is used, as in `model`.
    tokenizer: Text = "bytes"


# A peer answers within milliseconds, also over TLS. Several lost packets, or a process that was stopped for a moment,
# cost up to 3 s; whoever waits longer keeps a prompt from being replayed elsewhere.
CONNECT_TIMEOUT_S: Final = 5.0


class TransferConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Workers and `baton up` check `transport`, because the table of transports lies above this file."""

    # auto (on one host shm, or cuda_ipc between GPUs; else nccl between GPUs, else tcp), shm, cuda_ipc, nccl or tcp.
    # nccl takes 128 MiB of GPU memory at either end of each pair of a prefill and a decode worker.
    transport: Text = "auto"
    # Seconds until blocks that were reserved for a prompt and did not arrive are given up.
    lease_ttl_s: Seconds = 120.0
    # Send a checksum with every block and verify it before the sequence runs.
    checksum: bool = False

    @property
    def connect_timeout_s(self) -> float:
        """For a prefill worker to reach a decode worker, and for each answer of a handshake."""
        return CONNECT_TIMEOUT_S


class ServingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # `smollm2` (the small model that `make` installs), a name on the Hugging Face Hub (Qwen/Qwen3-0.6B, also @REVISION,
    # or Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf for a file in it), its address on huggingface.co, a folder in Hugging
    # Face form (config.json, *.safetensors, tokenizer.json) or a .gguf file. A model of the Hub is downloaded once,
    # into Hugging Face's cache; a GGUF is converted once, into ~/.cache/baton. `mock` computes nothing: see the section
    # of that name.
    model: Text = "smollm2"

    # The name that clients ask for. null: `smollm2`, the name on the Hub, or that of the folder or file.
    served_model_name: Text | None = None

    # Several models behind one address, instead of `model`: clients name one of them.
    #   - name: qwen                         # that clients ask for
    #     model: Qwen/Qwen3-0.6B             # as above
    #     aliases: [gpt-4o-mini]             # further names
    #     prefill: 0                         # workers, as in the section `workers`; where it is left out, as there
    #     decode: 2
    #     engine: {max_model_len: 8192}      # what is another one than in the section `engine`
    #     tool_parser: hermes                # as in the section `router`, and reasoning_parser likewise
    #     adapters: {sql: /adapters/sql}     # as below, and external_workers likewise
    #     weight: 1                          # its share, beside the others', of router.queue_limit and planned GPUs
    #     asleep: until_asked                # sleeps until a request wakes it, and after idle_s: 60 without one
    #     wake_timeout_s: 30                 # for which a request waits for it to wake
    #     priority: 0                        # a lower one sleeps first where others need its GPUs
    models: tuple[ModelConfig, ...] = ()

    # LoRA adapters by the names that clients ask for, each a folder in PEFT's form: {sql: /adapters/sql}. Workers with
    # vLLM load them at their start; external workers have their servers load what is missing there.
    adapters: dict[ModelName, Text] = {}

    # Separates services that share one NATS server. Lower-case letters, digits, - and _.
    namespace: Namespace = "default"

    # Workers announce themselves, publish the KV blocks that they hold and report their load over NATS.
    nats: NatsConfig = NatsConfig()

    router: RouterConfig = RouterConfig()

    workers: WorkersConfig = WorkersConfig()

    engine: EngineConfig = EngineConfig()

    # With `workers.engine: vllm`: arguments of vLLM's engine, as `vllm serve` has them, with _ for -, such as
    #   quantization: fp8
    # The section `engine` sets block_size, dtype, max_model_len, max_num_batched_tokens (max_batch_tokens),
    # max_num_seqs (max_running), tensor_parallel_size, kv_cache_memory_bytes (kv_memory) and gpu_memory_utilization
    # (gpu_memory_share).
    vllm: dict[str, Any] = {}

    # Engines that already run somewhere as `vllm serve` (docs/vllm.md), each a worker beside those that are started
    # here:
    #   - name: gpu-7                        # of the worker; with --data-parallel-size: gpu-7-dp0, gpu-7-dp1 and so on
    #     address: http://gpu-7:8000
    #     events: tcp://gpu-7:5557           # `endpoint` and `replay_endpoint` of its --kv-events-config
    #     replay: tcp://gpu-7:5558
    #     api_key_file: vllm.key             # if it asks for a key
    #     ca_file: ca.pem                    # of an https:// address, if this machine does not trust its CA
    #     model: Qwen/Qwen3-0.6B             # its name for the model, if it is another one than ours
    #     role: both                         # prefill: computes prompts for servers with role decode
    external_workers: tuple[ExternalWorkerConfig, ...] = ()

    # How long steps of an engine take, in milliseconds, where n new prompt tokens come behind p earlier ones of their
    # sequence and B sequences with K tokens of context in all decode:
    #   prefill = max(prefill_floor_ms, prefill_token_ms * n + prefill_pair_ms * n * (p + n / 2))
    #   decode  = decode_floor_ms + decode_sequence_ms * B + decode_token_ms * K
    # A step that does both takes the sum. The planner and the router go by them until they have timed enough steps; the
    # steps of the mock engine take exactly so long. `baton profile` finds the numbers of a machine. The defaults are
    # those of an 8B model on one H200, by order of magnitude.
    step_times: StepTimes = StepTimes()

    # `model: mock`: workers whose engine computes nothing and takes its time. All else is real: blocks, prefix cache,
    # events, streams, leases, transfers of a few bytes per block.
    mock: MockConfig = MockConfig()

    # How KV blocks travel from prefill to decode workers.
    transfer: TransferConfig = TransferConfig()

    # Keys stand in files, or in the variables that are named here; docs/operating.md says what each of them protects.
    security: SecurityConfig = SecurityConfig()

    # How many workers of each role there are: the planner looks at the queue, the KV load and the latencies, and
    # starts, drains and flips workers.
    planner: PlannerConfig = PlannerConfig()

    # Logs go to stderr, and usage where it says.
    logging: LoggingConfig = LoggingConfig()

    def __post_init__(self) -> None:
        check_names(self.external_workers)
        if self.models:
            self._check_models()

    def _check_models(self) -> None:
        """Raises ValueError for what several models have not."""
        check_models(self.models, self.namespace)
        if self.model != "smollm2" or self.served_model_name is not None:
            raise ValueError("model: models are given, too: name it in one of them, and leave this one out")
        for key in ("adapters", "external_workers"):
            if getattr(self, key):
                raise ValueError(f"{key}: models are given: name each in its model's {key}")

    def external_worker(self, worker_id: str) -> ExternalWorkerConfig | None:
        """Returns None when we start the worker's engine."""
        return next((worker for worker in self.external_workers if worker.name == worker_id), None)

    def may_have(self, role: Role) -> bool:
        """True when workers of the role start with the service, or a planner may add them."""
        limits = self.planner.limits
        most = limits.max_prefill if role == PREFILL else limits.max_decode
        return bool(self.workers.count(role) or (self.planner.enabled and most))

    @property
    def computes(self) -> bool:
        """Whether a worker of ours may compute the model: its weights are needed here."""
        return any(self.may_have(role) for role in ROLES) or not self.external_workers

    @property
    def step_targets(self) -> TargetsConfig:
        return self.planner.targets.of_steps(apart=self.may_have(PREFILL))

    def uses(self, engine: WorkerEngine) -> bool:
        """True when any worker has this engine, or one that a planner may add."""
        roles = [role for role in ROLES if self.may_have(role) or not self.workers.total]
        return any(engine in self.workers.by_engine(role) for role in roles)


AUTO_KEYS = ("block_size", "max_batch_tokens", "max_running")
"""Keys of the section `engine` that may say `auto`, which is the same as leaving them out."""


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
        path = place.strip("`").removeprefix("key` in `").removeprefix("$.")
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


def for_prefill_worker(config: ServingConfig) -> ServingConfig:
    """The configuration of a prefill worker: prefill_tensor_parallel takes effect."""
    engine = config.engine
    ranks = engine.prefill_tensor_parallel or engine.tensor_parallel
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(engine, tensor_parallel=ranks))


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
            if left := told_of(at, value):
                raise ConfigError(f"{where}: {left[0]}", left[1])
            near = nearest(str(key), fields, "one", "".join(f"{part}." for part in path))
            raise ConfigError(f"{where}: {at}", f"unknown key{near or '; serving.yaml has all'}")
        inner = fields[key]
        sections = [kind for kind in (inner, *get_args(inner)) if isinstance(kind, type) and issubclass(kind, Struct)]
        if sections and get_origin(inner) is not tuple:
            _refuse_unknown_keys(value, sections[0], where, (*path, str(key)))
        elif sections and isinstance(value, list):
            for number, item in enumerate(value):
                _refuse_unknown_keys(item, sections[0], where, (*path, f"{key}[{number}]"))
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
