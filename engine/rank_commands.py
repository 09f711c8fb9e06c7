"""What rank 0 of a tensor-parallel worker tells the others. The ranks run the same code on one host, so these types lie
beside it and not among the contracts between independent processes (proto/).

`engine/tensor_parallel.py` sends, `engine/rank_process.py` carries out: a new command, such as one that moves KV or
lets memory go, belongs into the union below and into the match there.
"""

from typing import TypeAlias

import msgspec

from baton.config import EngineConfig
from engine.attention import Span
from engine.model_config import ModelConfig
from engine.step_shape import StepShape


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """The first command: every rank builds its part of the engine, together with the others."""

    meeting: str  # the path of `Collective`
    folder: str | None  # of the model; None: random weights, for measurements
    model: ModelConfig
    eos_token_ids: frozenset[int]
    config: EngineConfig


class TorchStep(msgspec.Struct, frozen=True, tag="torch_step", array_like=True):
    """A step of ModelRunner."""

    token_ids: list[int]
    prefill: list[Span]
    decode: list[Span]
    sample_rows: list[int]


class DeviceStep(msgspec.Struct, frozen=True, tag="device_step", array_like=True):
    """A step of CudaRunner: what StepBuffer has packed says all."""

    shape: StepShape
    graph: int | None  # rows of the graph that is replayed; None: it is launched kernel by kernel
    drawn_rows: list[int]  # samples that rank 0 draws on the host
    words: memoryview  # int32


class ZeroTail(msgspec.Struct, frozen=True, tag="zero_tail", array_like=True):
    """What lies behind `used` tokens of a block is cleared."""

    layer: int
    block: int
    used: int


class Sleep(msgspec.Struct, frozen=True, tag="sleep", array_like=True):
    """See engine/model_memory.py."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    tags: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """The last command."""


Command: TypeAlias = Load | TorchStep | DeviceStep | ZeroTail | Sleep | Wake | Stop

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
