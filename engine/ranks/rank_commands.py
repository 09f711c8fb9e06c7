"""Commands from rank 0 of a tensor-parallel worker to the other ranks. Because all ranks run the same code on one host,
these types lie here and not among the contracts between independent processes (proto/).

A new command is a type here, a member of a union below, and a case where it is carried out: in
engine/ranks/rank_process.py, or beside it when it concerns pushes (rank_pushes.py), the host tier (ranked_tier.py) or
the disk tier (ranked_disk.py).
"""

from typing import TypeAlias

import msgspec

from baton_proto.worker import Grant
from engine.blocks.disk_copies import DiskBlock
from engine.runners.step_shape import DeviceDraw, DeviceStep, TorchStep
from runtime.checkpoint.model_config import ModelConfig
from runtime.config.serving import EngineConfig, TransferConfig
from runtime.security.cluster_key import TlsMode


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """The first command: every rank builds its part of the engine, together with the others."""

    meeting: str  # path where the ranks' Collective meets
    folder: str | None  # the model's; None: random weights, for measurements
    model: ModelConfig
    eos_token_ids: frozenset[int]
    config: EngineConfig


class OpenSender(msgspec.Struct, frozen=True, tag="open_sender", array_like=True):
    """Sent by a prefill worker before its first push, and when its weights are others: who the worker is."""

    worker_id: str
    incarnation: int
    model_hash: str
    config: TransferConfig
    cluster_key: str | None  # through memory that only the ranks share; never to be shown
    tls: TlsMode = "off"


class BeginPush(msgspec.Struct, frozen=True, tag="begin_push", array_like=True):
    """Each rank answers with one PushEnded (engine/ranks/rank_reports.py) when its part of the push has ended."""

    grant: Grant


class ShippedPiece(msgspec.Struct, frozen=True, array_like=True):
    """A `kvtransfer.prefill_side.sending.Piece`, with the push's id in place of the push."""

    transfer_id: str
    first: int
    source: tuple[int, ...]
    tail: int


class Ship(msgspec.Struct, frozen=True, tag="ship", array_like=True):
    """Sent right before the step that completes these pieces."""

    pieces: list[ShippedPiece]


class CommitPush(msgspec.Struct, frozen=True, tag="commit_push", array_like=True):
    """Carries no payload: rank 0 alone sends the payload."""

    transfer_id: str


class AbortPush(msgspec.Struct, frozen=True, tag="abort_push", array_like=True):
    """Has no effect on a rank where the push has ended."""

    transfer_id: str
    reason: str


class CloseSender(msgspec.Struct, frozen=True, tag="close_sender", array_like=True):
    """Every push has ended, well or not, when this command is done."""


class ExportSlab(msgspec.Struct, frozen=True, tag="export_slab", array_like=True):
    """Sent by a decode worker; each rank answers with SlabExported (engine/ranks/rank_reports.py)."""


class OpenTier(msgspec.Struct, frozen=True, tag="open_tier", array_like=True):
    """Each rank takes host memory for as many blocks of its own slab."""

    num_slots: int


class StoreKv(msgspec.Struct, frozen=True, tag="store_kv", array_like=True):
    """Calls `LowerTier.store` on every rank, which answers with one KvMoved (engine/ranks/rank_reports.py)."""

    move: int
    blocks: list[int]
    slots: list[int]


class LoadKv(msgspec.Struct, frozen=True, tag="load_kv", array_like=True):
    """Calls `LowerTier.load` on every rank, which answers with one KvMoved."""

    move: int
    slots: list[int]
    blocks: list[int]


class ComeAfter(msgspec.Struct, frozen=True, tag="come_after", array_like=True):
    """Sent before the step that comes after these copies; they may have ended."""

    move: int


class FinishKv(msgspec.Struct, frozen=True, tag="finish_kv", array_like=True):
    """All copies between slab and host tier have ended when this command is done."""


class OpenDisk(msgspec.Struct, frozen=True, tag="open_disk", array_like=True):
    """Each rank opens its own files in rank 0's folder; as many slots as rank 0's have."""

    folder: str
    num_slots: int


class WriteCopy(msgspec.Struct, frozen=True, tag="write_copy", array_like=True):
    """Calls `DiskTier.write` on every rank, which answers with one CopyEnded (engine/ranks/rank_reports.py)."""

    slot: int
    copy: int
    block: DiskBlock


class ReadCopy(msgspec.Struct, frozen=True, tag="read_copy", array_like=True):
    """Calls `DiskTier.read` on every rank, which answers with one CopyEnded."""

    copy: int
    slot: int
    block: DiskBlock


class WipeDisk(msgspec.Struct, frozen=True, tag="wipe_disk", array_like=True):
    """Calls `DiskTier.wipe` on every rank."""


class MoveDisk(msgspec.Struct, frozen=True, tag="move_disk", array_like=True):
    """Calls `DiskTier.move` on every rank. Rank 0 renames the folder of all."""

    name: str


class CloseDisk(msgspec.Struct, frozen=True, tag="close_disk", array_like=True):
    """Closes the disk: what was written is there when this command is done."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep", array_like=True):
    """`level`: see engine/loading/model_memory.py."""

    level: int


class Wake(msgspec.Struct, frozen=True, tag="wake", array_like=True):
    tags: tuple[str, ...]


class TakeTensor(msgspec.Struct, frozen=True, tag="take_tensor", array_like=True):
    """Rank 0 broadcasts a whole tensor of new weights."""

    name: str
    shape: tuple[int, ...]


class EndUpdate(msgspec.Struct, frozen=True, tag="end_update", array_like=True):
    """Ends an update: all tensors were taken."""


class ReadWeights(msgspec.Struct, frozen=True, tag="read_weights", array_like=True):
    """Each rank replaces its part of all weights by those of this checkpoint, which rank 0 has checked."""

    folder: str


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """The last command."""


PushCommand: TypeAlias = OpenSender | BeginPush | Ship | CommitPush | AbortPush | CloseSender
TierCommand: TypeAlias = OpenTier | StoreKv | LoadKv | ComeAfter | FinishKv
DiskCommand: TypeAlias = OpenDisk | WriteCopy | ReadCopy | WipeDisk | MoveDisk | CloseDisk
UpdateCommand: TypeAlias = TakeTensor | EndUpdate | ReadWeights
Command: TypeAlias = (
    Load
    | TorchStep
    | DeviceStep
    | DeviceDraw
    | PushCommand
    | TierCommand
    | DiskCommand
    | ExportSlab
    | Sleep
    | Wake
    | UpdateCommand
    | Stop
)

encode_command = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
