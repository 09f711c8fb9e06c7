"""NIXL (https://github.com/ai-dynamo/nixl), the transfer library of Dynamo and vLLM, over the same runs of bytes."""

import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transfer.case import Case

RUN_KIB = (8, 64, 256, 1024, 16384)
MIB = (4, 64, 512)
DONE, FAILED = "DONE", "ERR"
TIMEOUT_S = 20.0
VERSION = "1.5.1"


def _agent(case: Case, name: str) -> tuple[Any, Any]:
    case.start()
    import torch
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    memory = torch.zeros(2 * MIB[-1] << 20, dtype=torch.uint8, device="cuda")
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory(memory)
    return agent, memory


def decode(case: Case, pipe: Connection, answers: Any) -> None:
    agent, memory = _agent(case, "decode")
    pipe.send((agent.get_agent_metadata(), memory.data_ptr()))
    pipe.recv()  # waits until the prefill side has ended


def prefill(case: Case, pipe: Connection, answers: Any) -> None:
    agent, memory = _agent(case, "prefill")
    metadata, theirs = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    for mib in MIB:
        for kib in RUN_KIB:
            if kib << 10 <= mib << 20:
                answers.put(_row(agent, peer, memory, theirs, mib, kib, case.rounds))
    answers.put(None)


def _row(agent: Any, peer: str, memory: Any, theirs: int, mib: int, kib: int, rounds: int) -> dict[str, Any]:
    import torch

    nbytes = kib << 10
    count, places = (mib << 20) // nbytes, len(memory) // nbytes
    ours = [(memory.data_ptr() + place * nbytes, nbytes, 0) for place in torch.randperm(places)[:count].tolist()]
    far = [(theirs + place * nbytes, nbytes, 0) for place in torch.randperm(places)[:count].tolist()]
    times, posts = [], []
    for _ in range(rounds + 1):
        local, remote = agent.get_xfer_descs(ours, "VRAM"), agent.get_xfer_descs(far, "VRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, peer)
        begin_s = time.perf_counter()
        state = agent.transfer(handle)
        posts.append(time.perf_counter() - begin_s)
        while state not in (DONE, FAILED) and time.perf_counter() - begin_s < TIMEOUT_S:
            state = agent.check_xfer_state(handle)
        times.append(time.perf_counter() - begin_s)
        if state != DONE:
            raise RuntimeError(f"a transfer ended as {state}")
        agent.release_xfer_handle(handle)
    seconds, post_s = sorted(times[1:])[rounds // 2], sorted(posts[1:])[rounds // 2]
    row = {"way": f"NIXL {VERSION}", "MiB": mib, "run KiB": kib, "GB/s": (mib << 20) / seconds / 1e9}
    return row | {"us": seconds * 1e6, "host us": post_s * 1e6}
