"""A prefill or decode worker's end of KV transfers in a process of its own, driven and killed by peers.PeerProcess."""

import json
import os
import sys
from typing import Any

import msgspec

from baton_proto.worker import Grant
from kvtransfer.prefill_side.push import Push, PushResult
from tests.kvtransfer.peers import Decode, PatientConfig, Prefill, RawPeer
from tests.kvtransfer.rank_process import decode_rank, prefill_rank
from tests.kvtransfer.slab_process import slab_decode, slab_prefill

RANKS = {"prefill-rank": prefill_rank, "decode-rank": decode_rank}
SLABS = {"slab-prefill": slab_prefill, "slab-decode": slab_decode}


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    if role in SLABS:
        SLABS[role](settings, _commands(), _say)
        return
    _say(ready=True)
    if role in RANKS:
        RANKS[role](_say)
    else:
        {"prefill": _prefill, "decode": _decode, "forking-prefill": _forking_prefill}[role](settings)


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _commands() -> Any:
    return (json.loads(line) for line in sys.stdin)


def _prefill(settings: dict[str, Any]) -> None:
    prefill = Prefill(msgspec.convert(settings["config"], PatientConfig), seed=settings.get("seed", 0))
    pushes: dict[str, Push] = {}

    def tell_end(transfer_id: str, result: PushResult) -> None:
        _say(done=transfer_id, ok=result.ok, reason=result.reason, transport=result.transport)

    for command in _commands():
        match command["do"]:
            case "begin":
                grant = msgspec.convert(command["grant"], Grant)
                name = grant.transfer_id
                pushes[name] = prefill.sender.begin(grant, lambda result, name=name: tell_end(name, result))  # type: ignore[misc]
            case "layer":
                pushes[command["push"]].layer_ready(command["layer"], 0, command["source"])
            case "commit":
                pushes[command["push"]].commit(b"first token")
    prefill.close()


def _decode(settings: dict[str, Any]) -> None:
    decode = Decode(msgspec.convert(settings["config"], PatientConfig))
    for command in _commands():
        _say(grant=msgspec.to_builtins(decode.receiver.reserve(command["blocks"], 0)))
    decode.close()


def _forking_prefill(settings: dict[str, Any]) -> None:
    """Begins a transfer over shared memory and forks a child that keeps all descriptors, the token among them."""
    peer = RawPeer(msgspec.convert(settings["grant"], Grant), unix=True)
    answer = peer.begin()
    if os.fork() == 0:
        peer.sock.detach()
        sys.stdin.read()  # ends when the test closes the pipe
        os._exit(0)
    _say(answer=type(answer).__name__)
    sys.stdin.read()


if __name__ == "__main__":
    main()
