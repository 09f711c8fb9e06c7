"""The table of targets: what reads bytes that others may have made, and how it may refuse them."""

import json
import random
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from baton_proto import discovery, kv_events, planner_control
from baton_proto.routers import charges, router_report
from baton_proto.worker import decode_greeting
from engine.model.weights import Weights
from router.text.chat_template import ChatTemplate, load_chat_template
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.gguf.convert import convert
from runtime.checkpoint.model_config import load_model_config
from runtime.config.serving import load_config, parse_bytes
from runtime.errors import BatonError
from tests.fuzz import hostile_asks, image_asks
from tests.fuzz.asked_targets import answer, body, bounded, drawn, drawn_answer, drawn_schema, grammar, schema

WIRE = (msgspec.DecodeError,)


@dataclass(frozen=True, slots=True)
class Target:
    """`feed` must return, or raise one of `allowed`. `seeds`: well-formed input to begin with. `draw`: more input.
    `known`: a defect that is not mended yet, which an input of the corpus shows."""

    name: str
    feed: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...] = (BatonError,)
    seeds: tuple[bytes, ...] = ()
    known: str = ""
    draw: Callable[[random.Random], bytes] | None = None


def _in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """The bytes stand in a file of that name, in a folder of its own."""

    def feed(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            return read(path)

    return feed


def _render(data: bytes) -> str:
    source, _, content = data.decode("utf-8", "replace").partition("\0")
    return ChatTemplate(source, {}, "fuzzed").render([{"role": "user", "content": content}])


def _load_tensors(path: Path) -> object:
    weights = Weights(path.parent, torch.float32)
    return weights.take_fused({"a": (1, 2)})


def _tokenize(path: Path) -> object:
    tokenizer = Tokenizer(path.parent, 300)
    return tokenizer.decode(tokenizer.encode("a b a").tolist()), tokenizer.token_text(0)


def _chat(path: Path) -> object:
    return load_chat_template(path.parent).render([{"role": "user", "content": "hello"}])


SETTINGS = b'{"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}"}]}'
TEMPLATE = b"{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}\0hello"
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8}
TENSOR = json.dumps({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
SAFETENSORS = struct.pack("<Q", len(TENSOR)) + TENSOR + bytes(8)
SHARDS = b'{"weight_map": {"a": "model-1.safetensors"}}'
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    }
).encode()
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 4) + b"name" + struct.pack("<IQ", 8, 1) + b"x"
SCHEMA = b'{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'

TARGETS: tuple[Target, ...] = (
    Target(
        "serving.yaml",
        _in_file("serving.yaml", load_config),
        seeds=(b"model: mock\nrouter: {http_port: 0}\n",),
    ),
    Target(
        "sizes",
        lambda data: parse_bytes(data.decode("utf-8", "replace"), "fuzzed"),
        seeds=(b"64MiB", b"1.5 GB"),
    ),
    Target(
        "config.json",
        _in_file("config.json", lambda path: load_model_config(path.parent)),
        seeds=(json.dumps(MODEL).encode(),),
    ),
    Target("chat template", _render, seeds=(TEMPLATE,)),
    Target("GGUF", _in_file("m.gguf", lambda path: convert(path, path.parent / "out", False)), seeds=(GGUF,)),
    Target("safetensors", _in_file("model.safetensors", _load_tensors), seeds=(SAFETENSORS,)),
    Target("shards", _in_file("model.safetensors.index.json", _load_tensors), seeds=(SHARDS,)),
    Target("tokenizer.json", _in_file("tokenizer.json", _tokenize), seeds=(TOKENIZER,)),
    Target("tokenizer_config.json", _in_file("tokenizer_config.json", _chat), seeds=(SETTINGS,)),
    Target("greeting", decode_greeting, WIRE),
    Target("worker record", discovery.decode_record, WIRE, (b'{"version": 1, "worker_id": "decode-1"}',)),
    Target("load report", discovery.decode_load_report, WIRE),
    Target("KV events", kv_events.decode_batch, WIRE),
    Target("charges", charges.decode_charges, WIRE),
    Target("planner question", planner_control.decode_question, WIRE),
    Target("planner answer", planner_control.decode_answer, WIRE),
    Target("router report", router_report.decode_router_report, WIRE),
    Target("grammar", bounded(grammar), (), (b"regex\0[a-c]{2,5}",), draw=drawn(hostile_asks.GRAMMARS)),
    Target("schema", bounded(schema), (), (SCHEMA,), draw=drawn_schema),
    Target("tools", bounded(body), (), draw=drawn(hostile_asks.BODIES)),
    Target("images", bounded(image_asks.images), (), draw=drawn(image_asks.IMAGES)),
    Target("answer", bounded(answer), (), (SCHEMA + b'\0{"name": "f", "arguments": {"n": 1}}',), draw=drawn_answer),
)
