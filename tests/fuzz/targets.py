"""The table of targets: what reads bytes that others may have made, and how it may refuse them."""

import json
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton_proto import charges, discovery, kv_events, planner_control, router_report
from baton_proto.worker import decode_greeting
from router.text.chat_template import ChatTemplate
from runtime.checkpoint.gguf_convert import convert
from runtime.checkpoint.model_config import load_model_config
from runtime.config.serving import load_config, parse_bytes
from runtime.errors import BatonError

WIRE = (msgspec.DecodeError,)


@dataclass(frozen=True, slots=True)
class Target:
    """`feed` must return, or raise one of `allowed`. `seeds`: well-formed input to begin with.
    `known`: a defect that is not mended yet, which an input of the corpus shows."""

    name: str
    feed: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...] = (BatonError,)
    seeds: tuple[bytes, ...] = ()
    known: str = ""


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


TEMPLATE = b"{% for message in messages %}{{ message['role'] }}{{ message['content'] }}{% endfor %}\0hello"
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 8}
GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 4) + b"name" + struct.pack("<IQ", 8, 1) + b"x"

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
    Target("greeting", decode_greeting, WIRE),
    Target("worker record", discovery.decode_record, WIRE, (b'{"version": 1, "worker_id": "decode-1"}',)),
    Target("load report", discovery.decode_load_report, WIRE),
    Target("KV events", kv_events.decode_batch, WIRE),
    Target("charges", charges.decode_charges, WIRE),
    Target("planner question", planner_control.decode_question, WIRE),
    Target("planner answer", planner_control.decode_answer, WIRE),
    Target("router report", router_report.decode_router_report, WIRE),
)
