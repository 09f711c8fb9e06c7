"""What rank 0 of a tensor-parallel worker tells the others. The ranks run the same code on one host, so these types lie
beside it and not among the contracts between independent processes (proto/).

`tensor_parallel.py` sends, `rank_process.py` carries out: a new command, such as one that moves KV or
lets memory go, belongs into the union below and into the match there.
"""

from typing import TypeAlias

import msgspec

from baton_proto.worker import Grant
from engine.runners.step_shape import DeviceStep, TorchStep
from runtime.checkpoint.model_config import ModelConfig
from runtime.config.serving import EngineConfig, TransferConfig


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """The first command: every rank builds its part of the engine, together with the others."""

    meeting: str  # the path of `Collective`
    folder: str | None  # of the model; None: random weights, for measurements
    model: ModelConfig
    eos_token_ids: frozenset[int]
    config: EngineConfig


class OpenSender(msgspec.Struct, frozen=True, tag="open_sender", array_like=True):
    """Of a prefill worker: what ranks have to know before the first push."""

    worker_id: str
    incarnation: int
    model_hash: str
    config: TransferConfig
    cluster_key: str | None  # through memory that only the ranks share; never to be shown


class BeginPush(msgspec.Struct, frozen=True, tag="begin_push", array_like=True):
    """Each rank answers it with one PushEnded (engine/ranks/rank_reports.py), sooner or later."""

    grant: Grant


class ShippedPiece(msgspec.Struct, frozen=True, array_like=True):
    """A `kvtransfer.prefill_side.sending.Piece`."""

    transfer_id: str
    first: int
    source: tuple[int, ...]
    tail: int


class Ship(msgspec.Struct, frozen=True, tag="ship", array_like=True):
    """Right before the step that completes these."""

    pieces: list[ShippedPiece]


class CommitPush(msgspec.Struct, frozen=True, tag="commit_push", array_like=True):
    """Without the payload, which is rank 0's to send."""

    transfer_id: str


class AbortPush(msgspec.Struct, frozen=True, tag="abort_push", array_like=True):
    """Of no effect where it has ended."""

    transfer_id: str
    reason: str


class CloseSender(msgspec.Struct, frozen=True, tag="close_sender", array_like=True):
    """Every push has ended, well or not, when this is done."""


class ExportSlab(msgspec.Struct, frozen=True, tag="export_slab", array_like=True):
    """Of a decode worker: each rank answers with its slab's descriptor of now (engine/ranks/rank_reports.py)."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", array_like=True):
    """See engine/loading/model_memory.py."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    tags: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """The last command."""


PushCommand: TypeAlias = OpenSender | BeginPush | Ship | CommitPush | AbortPush | CloseSender
Command: TypeAlias = Load | TorchStep | DeviceStep | PushCommand | ExportSlab | Sleep | Wake | Stop

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
