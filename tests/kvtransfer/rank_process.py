"""A rank of a prefill or decode worker in a process of its own, driven by ranks.py. Roles of peer_process.py.

`open` makes it a rank of a new worker, so that one process serves many tests.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import Push, PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from tests.kvtransfer.peers import PatientConfig, fill
from tests.kvtransfer.reference import heads_of, rank_words, reference

Say = Callable[..., None]


class PrefillRank:
    def __init__(self, command: dict[str, Any], say: Say) -> None:
        identity = identity_of(command)
        held = heads_of(command["rank"], command["size"], identity.layout.num_kv_heads)
        self._say = say
        self._slab = Slab(identity.slab_layout)
        rank_words(self._slab)[:] = reference(identity.layout, command["seed"])[:, :, held]
        self._sender = Sender(self._slab, identity, msgspec.convert(command["config"], PatientConfig))
        self._pushes: dict[str, Push] = {}

    def carry_out(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "begin":
                grant = msgspec.convert(command["grant"], Grant)
                name = grant.transfer_id
                self._pushes[name] = self._sender.begin(grant, lambda result: self._tell_end(name, result))
            case "layer":
                self._pushes[command["push"]].layer_ready(command["layer"], command["first"], command["source"])
            case "commit":
                self._pushes[command["push"]].commit(command["payload"].encode())
            case "abort":
                self._pushes[command["push"]].abort(command["reason"])

    def close(self) -> None:
        self._sender.close()
        self._slab.close()

    def _tell_end(self, transfer_id: str, result: PushResult) -> None:
        self._say(done=transfer_id, **msgspec.to_builtins(result))


def prefill_rank(say: Say) -> None:
    rank: PrefillRank | None = None
    for command in map(json.loads, sys.stdin):
        if command["do"] == "open":
            rank = PrefillRank(command, say)
            say(did="open")
            continue
        assert rank is not None
        if command["do"] == "close":
            rank.close()
            say(did="close")
        else:
            rank.carry_out(command)


def decode_rank(say: Say) -> None:
    """Owns a slab and nothing else: it never hears of a transfer."""
    slab, fd = Slab(SlabLayout(1, 1, 1, 1, 1, "float32")), -1
    for command in map(json.loads, sys.stdin):
        if command["do"] == "digest":
            say(digest=xxhash.xxh3_64_hexdigest(slab.buffer))
            continue
        if fd >= 0:
            os.close(fd)
        slab.suspend()
        if command["do"] == "renew":
            slab.resume()
        else:
            slab = Slab(identity_of(command).slab_layout)
            fill(slab, command["seed"])
        fd = slab.export()
        say(fd=fd)


def identity_of(command: dict[str, Any]) -> SlabIdentity:
    layout = msgspec.convert(command["layout"], SlabLayout)
    return SlabIdentity(command["worker_id"], 3, "model", layout, Shard(command["rank"], command["size"]))
