"""`python -m tests.vllm.record_events`: writes down what a real vLLM sends, for the tests without one.

The recording has stored, removed and cleared blocks, as the sockets sent them: frames in base64.
"""

import asyncio
import base64
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tests.test_packaging import ROOT
from tests.vllm.environment import vllm_python
from tests.vllm.server import BLOCK, NUM_BLOCKS, VllmServer, prompt

RECORDING = ROOT / "tests" / "data" / "vllm_events.json"


async def record(python: Path, folder: Path) -> dict[str, Any]:
    server, context = VllmServer(python, folder / "vllm.log"), zmq.asyncio.Context()
    subscription, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        await server.start()
        subscription.subscribe(b"")
        subscription.connect(server.endpoint)
        replay.connect(server.replay_endpoint)
        published: list[list[bytes]] = []
        await server.complete(prompt(1))
        await _replayed(replay)  # by now the subscription is there too
        for number, start in enumerate(range(2000, 2000 + 8 * NUM_BLOCKS * BLOCK, 8 * BLOCK)):
            await server.complete(prompt(2 + number % 3, start))
            if number == NUM_BLOCKS // 2:
                break
        await server.forget()
        await server.complete(prompt(2, 9000))
        answers = await _replayed(replay)
        last = int.from_bytes(answers[-2][2], "big")
        while not published or int.from_bytes(published[-1][1], "big") < last:
            published.append(await asyncio.wait_for(subscription.recv_multipart(), 60))
        version = [str(python), "-c", "import vllm; print(vllm.__version__)"]
        return {
            "vllm": subprocess.run(version, capture_output=True, text=True, check=True).stdout.split()[-1],
            "block_size": BLOCK,
            "published": [_text(frames) for frames in published],
            "replayed": [_text(frames) for frames in [answers[0], answers[-1]]],
        }
    finally:
        context.destroy(linger=0)
        await server.close()


async def _replayed(socket: zmq.asyncio.Socket) -> list[list[bytes]]:
    """All answers, the end's last."""
    await socket.send_multipart([b"", (0).to_bytes(8, "big")])
    answers: list[list[bytes]] = []
    while not answers or answers[-1][-2] != b"\xff" * 8:
        answers.append(await asyncio.wait_for(socket.recv_multipart(), 60))
    return answers


def _text(frames: list[bytes]) -> list[str]:
    return [base64.b64encode(frame).decode() for frame in frames]


def main() -> None:
    python = vllm_python()
    assert python is not None, "make vllm-env"
    with tempfile.TemporaryDirectory() as folder:
        recording = asyncio.run(record(python, Path(folder)))
    RECORDING.write_text(json.dumps(recording, indent=1) + "\n")


if __name__ == "__main__":
    main()
