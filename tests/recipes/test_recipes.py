"""Each recipe of docs/how-to.md, followed in a copy of the sources: it works, and it touches the files it names."""

from pathlib import Path

import pytest

from tests.recipes.scratch import GENERATED, ROOT, Scratch

pytestmark = pytest.mark.slow


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path)


def test_add_a_sampling_parameter(scratch: Scratch) -> None:
    rows = "proto/baton_proto/sampling.py"
    rule = "Rule(-100.0, 100.0, Needs.LOGITS, most=1024)"
    last = f"    logit_bias: Annotated[dict[Small, float], Meta(max_length=1024), {rule}] = {{}}\n"
    scratch.edit(rows, last, last + "    toy: Annotated[float, Rule(0.0, 2.0, Needs.LOGITS)] = 1.0\n")
    scratch.edit(
        "proto/baton/v1/inference.proto",
        "  optional uint32 n = 16;",
        "  optional float toy = 99;\n  optional uint32 n = 16;",
    )
    sampler = "engine/runners/sampler.py"
    scratch.edit(sampler, "    return bool(p.logit_bias) or", "    return p.toy != 1 or bool(p.logit_bias) or")
    first = "            _add_bias(scores, params)\n"
    toy = "            scores *= _column([p.toy for p in params], scores)\n"
    scratch.edit(sampler, first, first + toy)
    scratch.edit("engine/vllm/sampling.py", '    "logit_bias",\n', '    "logit_bias",\n    "toy",\n')
    scratch.run("proto/generate.py")
    scratch.run("-c", SAMPLING)
    scratch.has_followed("Add a sampling parameter")


SAMPLING = """
import torch
from baton import SamplingParams
from baton_proto.generated import inference_pb2 as pb
from baton_proto.sampling import Needs
from engine.sequences.sequence import Sequence
from engine.runners.sampler import Sampler
from router.api.grpc.messages import options_of
from router.api.openai.types import ChatBody, CompletionBody
from router.api.dialects.json_body import decode_body
from router.api.wishes.sampling_options import check_sampling
from runtime.errors import InvalidRequestError

chat = decode_body(b'{"model": "m", "toy": 0.5, "seed": 1, "messages": [{"role": "user", "content": "a"}]}', ChatBody)
text = decode_body(b'{"model": "m", "toy": 0.5, "seed": 1, "prompt": "a"}', CompletionBody)
ours = SamplingParams(toy=0.5, seed=1).options()
for options in (options_of(pb.SamplingOptions(toy=0.5, seed=1)), chat.options(), text.options(), ours):
    params = check_sampling(options, 10)
    assert params.toy == 0.5 and params.needs is Needs.LOGITS, params
try:
    check_sampling(options_of(pb.SamplingOptions(toy=3.0)), 10)
except InvalidRequestError as error:
    assert "toy" in str(error) and "2" in str(error)
else:
    raise AssertionError("not refused")
"""


def test_add_a_transport(scratch: Scratch) -> None:
    scratch.write(
        "kvtransfer/transports/toy.py",
        "from kvtransfer.transports.shm import ShmWriter\n\n\nclass ToyWriter(ShmWriter):\n    pass\n",
    )
    table = "kvtransfer/transports/table.py"
    scratch.edit(
        table,
        "# The fastest first.",
        "def _toy() -> tuple[MakeWriter, MakeIntake]:\n"
        "    from kvtransfer.transports.mapped import MappedIntake\n"
        "    from kvtransfer.transports.toy import ToyWriter\n\n"
        "    return ToyWriter, MappedIntake\n\n\n# The fastest first.",
    )
    row = '    Transport("tcp", ("host", "cuda"), "tcp", _tcp),\n'
    scratch.edit(table, row, row + '    Transport("toy", ("host",), "unix", _toy),\n')
    assert "toy" in scratch.run("-c", "from kvtransfer.transports.table import choices; print(choices())")
    refused = scratch.run("-m", "baton", "up", "--set", "transfer.transport=toi", fails=True)
    assert "'toy'" in refused
    scratch.has_followed("Add a transport")


def test_add_a_cost_term(scratch: Scratch) -> None:
    cost = "router/placement/cost.py"
    row = '    Term("others", "+ others", "what it costs others", ""),\n'
    scratch.edit(cost, row, row + '    Term("toy", "+ toy", "of each request", "toy_ms"),\n')
    scratch.edit(cost, "HOST, DISK, OTHERS = range", "HOST, DISK, OTHERS, TOY = range")
    scratch.edit(cost, "itl_ms, keep_steps = knobs[7:]", "itl_ms, keep_steps, toy_ms = knobs[7:]")
    scratch.edit(cost, "UniTuple(float64, 10)", "UniTuple(float64, 11)")
    formula = "    total = 0.0\n"
    scratch.edit(cost, formula, "    costs[i, TOY] = toy_ms * requests\n" + formula)
    passed = "        config.keep_steps,\n"
    scratch.edit("router/placement/candidates.py", passed, passed + "        config.toy_ms,\n")
    key = "    decode_steps: Weight = 8.0"
    scratch.edit("router/placement/weights.py", key, "    toy_ms: Weight = 0.0\n" + key)
    scratch.run("-c", COST)
    scratch.has_followed("Add a cost term")


COST = """
import random

from router.placement.cost import NUM_TERMS, TERMS, TOY
from router.placement.weights import Weights
from router.placement.candidates import NO_CANDIDATES, Candidates, Request
from router.placement.placement import weigh
import numpy as np

assert TERMS[TOY].name == "toy" and TOY == NUM_TERMS - 1
load = np.array([[2, 0, 0, 0, 0, 99, 0, 0, 0]])
decode = Candidates((("d", 1),), np.zeros(1, dtype=np.int32), load, np.ones((1, 6)))
weighing = weigh(Request(100, 16), decode, NO_CANDIDATES, Weights(toy_ms=3.0), random.Random())
assert weighing.costs()[0].terms[TOY] == 6.0
"""


def test_add_a_planner_policy(scratch: Scratch) -> None:
    scratch.write("planner/policy/toy.py", POLICY)
    rows = "runtime/config/planner.py"
    scratch.edit(rows, 'PolicyName = Literal["slo", "threshold"]', 'PolicyName = Literal["slo", "threshold", "toy"]')
    found = "from planner.policy.policy import make_policy; from runtime.config.planner import PlannerConfig;"
    assert "toy" in scratch.run("-c", f"{found} print(make_policy(PlannerConfig(policy='toy')).name)")
    scratch.has_followed("Add a planner policy")


POLICY = '''"""One worker of each role, whatever comes."""

from msgspec import Struct

from baton_proto.planner import Observation
from planner.policy.guards import LIMITS
from planner.policy.policy import Policy
from planner.policy.wanted import Wanted


class ToyMemory(Struct, frozen=True):
    pass


class ToyPolicy(Policy[ToyMemory]):
    name = "toy"
    memory = ToyMemory
    guards = LIMITS

    def initial(self) -> ToyMemory:
        return ToyMemory()

    def decide(self, observation: Observation, memory: ToyMemory) -> tuple[Wanted, ToyMemory]:
        return Wanted(1, 1, ("always",)), memory


POLICY = ToyPolicy
'''


def test_add_a_model_family(scratch: Scratch) -> None:
    scratch.write(
        "engine/model/families/toy.py",
        '"""Llama by another name."""\n\nfrom engine.model.families.llama import Llama\n\n\nclass Toy(Llama): ...\n',
    )
    row = '    "llama": Family(hf_class="LlamaForCausalLM", gguf="pairs"),\n'
    scratch.edit("runtime/checkpoint/families.py", row, row + '    "toy": Family(hf_class="ToyForCausalLM"),\n')
    scratch.edit("engine/model/families/registry.py", '    "llama": Llama,\n', '    "llama": Llama,\n    "toy": Toy,\n')
    scratch.edit(
        "engine/model/families/registry.py",
        "from engine.model.families.qwen3 import Qwen3\n",
        "from engine.model.families.qwen3 import Qwen3\nfrom engine.model.families.toy import Toy\n",
    )
    scratch.run("-c", FAMILY)
    scratch.has_followed("Add a model family")


FAMILY = """
import json
from pathlib import Path
from engine.model.families.registry import MODELS
from runtime.checkpoint.model_config import load_model_config

config = {"architectures": ["ToyForCausalLM"], "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
Path("model").mkdir()
Path("model/config.json").write_text(json.dumps(config))
assert MODELS[load_model_config(Path("model")).architecture].__name__ == "Toy"
"""


def test_add_a_metric(scratch: Scratch) -> None:
    metrics = "worker/metrics.py"
    row = '    "leases": ('
    scratch.edit(metrics, row, '    "toy": ("Steps so far", lambda of: of.load.steps),\n' + row)
    scratch.run("-c", "from worker.metrics import GAUGES; assert 'toy' in GAUGES")
    scratch.has_followed("Add a metric")


def test_add_a_cli_command(scratch: Scratch) -> None:
    scratch.write("baton/cli/toy.py", COMMAND)
    row = '    "demo": "baton.cli.demo:demo",\n'
    scratch.edit("baton/cli/app.py", row, row + '    "toy": "baton.cli.toy:toy",\n')
    assert "Plays with NAME" in scratch.run("-m", "baton", "--help")
    assert scratch.run("-m", "baton", "toy", "train").strip() == "train"
    scratch.has_followed("Add a command")


COMMAND = '''"""`baton toy`: plays."""

from baton.cli.terminal.output import console


def toy(name: str) -> None:
    """Plays with NAME."""
    console().print(name)
'''


def test_add_an_event_type(scratch: Scratch) -> None:
    events = "proto/baton_proto/kv_events.py"
    scratch.edit(events, "KvEvent = Stored | Removed | Moved | Cleared", TOY_EVENT)
    log = "engine/blocks/kv_event_log.py"
    scratch.edit(log, "KvEvent, Moved, Removed, Stored", "KvEvent, Moved, Removed, Stored, Toy")
    scratch.edit(
        log,
        "    def take(self)",
        "    def toy(self) -> None:\n        self._pending.append(Toy())\n\n    def take(self)",
    )
    tree = "router/index/radix_tree.py"
    cleared = "            case Cleared():\n                self.clear(worker)\n"
    scratch.edit(tree, cleared, cleared + "            case Toy():\n                self.clear(worker)\n")
    scratch.edit(tree, "KvEvent, Moved, Removed, Stored", "KvEvent, Moved, Removed, Stored, Toy")
    scratch.edit("baton/cli/events/tail.py", '    CLEARED = "cleared"\n', '    CLEARED = "cleared"\n    TOY = "toy"\n')
    scratch.run("-c", EVENT)
    scratch.has_followed("Add an event type")


TOY_EVENT = """class Toy(Struct, frozen=True, tag="toy"):
    pass


KvEvent = Stored | Removed | Moved | Cleared | Toy"""
EVENT = """
from baton.cli.events.tail import EventType
from baton.events.event_line import KINDS
from baton_proto.kv_events import MAJOR, KvEventBatch, Toy, decode_batch, encode_batch
from engine.blocks.kv_event_log import KvEventLog
from router.index.radix_tree import RadixTree

log = KvEventLog()
log.toy()
batch = decode_batch(encode_batch(KvEventBatch(MAJOR, "w", 1, 1, 0.0, log.take())))
assert batch.events == [Toy()]
RadixTree().apply(("w", 1), batch.events[0])
assert set(KINDS) == {kind.value for kind in EventType}
"""


def test_add_an_engine(scratch: Scratch) -> None:
    scratch.write("worker/engines/toy.py", ENGINE)
    row = '    EngineRow("vllm",'
    scratch.edit("worker/engines/table.py", row, '    EngineRow("toy", "worker.engines.toy:build_toy"),\n' + row)
    scratch.run("-c", TOY_ENGINE)
    assert "baton, toy, vllm" in scratch.run("-m", "baton", "up", "--decode", "2", "--config", "toys.yaml", fails=True)
    scratch.has_followed("Add an engine")


ENGINE = '''"""A mock by another name."""

from dataclasses import replace

from runtime.config.serving import ServingConfig
from worker.engines.base import EngineAssembly
from worker.engines.own import build_mock


def build_toy(config: ServingConfig) -> EngineAssembly:
    return replace(build_mock(config), name="toy")
'''
TOY_ENGINE = """
from pathlib import Path

from baton.cli.up import worker_counts
from runtime.config.serving import parse_config
from worker.engines.table import build_worker_engine

config = parse_config({"model": "mock", "workers": {"engine": "toy", "decode": worker_counts("toy=2")}})
assert config.workers.by_engine("decode") == {"toy": 2}
assembly = build_worker_engine(config)
assert assembly.name == "toy" and assembly.engine.load().blocks_total
assembly.close()
Path("toys.yaml").write_text("{model: mock, workers: {engine: toi}}")
"""


def test_add_a_question_to_a_worker(scratch: Scratch) -> None:
    messages = "proto/baton_proto/worker.py"
    scratch.edit(messages, "@dataclass(frozen=True, slots=True)\nclass Question(", TOY_MESSAGES)
    scratch.edit(messages, "= (SNAPSHOT,", "= (TOY, SNAPSHOT,")
    last = 'WAKE = Question("Wake", WakeRequest, SleepReport)\n'
    scratch.edit(messages, last, last + 'TOY = Question("Toy", ToyRequest, ToyReport)\n')
    server = "worker/rpc_server.py"
    row = "            wire.WAKE: self._wake,\n"
    scratch.edit(server, row, row + "            wire.TOY: self._toy,\n")
    scratch.edit(
        server,
        "    async def _drain(",
        "    async def _toy(self, request: wire.ToyRequest, context: Context) -> wire.ToyReport:\n"
        "        return wire.ToyReport(self._runtime.worker_id)\n\n    async def _drain(",
    )
    client = "runtime/calls/worker.py"
    scratch.edit(
        client,
        "    async def drain(",
        "    async def toy(self) -> wire.ToyReport:\n"
        "        return await self._ask(wire.TOY, wire.ToyRequest(wire.MAJOR), CALL_TIMEOUT_S)\n\n    async def drain(",
    )
    scratch.run("-c", QUESTION)
    scratch.has_followed("Add a question to a worker")


TOY_MESSAGES = """class ToyRequest(Struct, frozen=True):
    version: int


class ToyReport(Struct, frozen=True):
    worker_id: str


@dataclass(frozen=True, slots=True)
class Question("""
QUESTION = """
from baton_proto.worker import QUESTIONS, TOY
from runtime.calls.worker import WorkerClient
from worker.rpc_server import WorkerService

assert TOY in QUESTIONS
assert all(hasattr(WorkerClient, question.name.lower()) for question in QUESTIONS)
assert all(hasattr(WorkerService, f"_{question.name.lower()}") for question in QUESTIONS)
"""


def test_add_a_configuration_key(scratch: Scratch) -> None:
    above = "    # Requests in flight on one decode worker."
    toy = "    # How many toys there may be.\n    toy_limit: Positive = 7\n"
    scratch.edit("runtime/config/serving.py", above, toy + above)
    written = scratch.run("-m", "baton", "config")
    assert "  # How many toys there may be.\n  toy_limit: 7\n" in written
    scratch.rewrite("serving.yaml", written)
    scratch.run(
        "-c", "from pathlib import Path; from runtime.config.serving import *; load_config(Path('serving.yaml'))"
    )
    scratch.has_followed("Add a configuration key")


def test_the_generated_files_are_where_the_recipes_say() -> None:
    assert (ROOT / GENERATED).is_dir()
