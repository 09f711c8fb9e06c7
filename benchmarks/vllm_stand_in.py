"""`python -m benchmarks.vllm_stand_in --model NAME --step-ms MS`: speaks like one `vllm serve`, and computes nothing.

Every answer under way gets a token per step, each in a chunk of HTTP of its own, as vLLM 0.32 writes them; its first
one comes at once. A line of JSON names the ports. For measuring what stands before a server, whose cores a real one
would take.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvloop
import zmq
import zmq.asyncio

from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import resolve_model

HOST: Final = "127.0.0.1"
BLOCK_TOKENS: Final = 64
METRICS: Final = f"""
vllm:num_requests_running{{engine="0",model_name="m"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.0
vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",engine="0",num_gpu_blocks="100000"}} 1.0
"""
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
WORDS: Final = range(1000, 30_000)  # token ids of an answer


@contextmanager
def running(model: str, step_ms: float) -> Iterator[tuple[int, int, int]]:
    """Starts one in a process of its own. Gives the ports of HTTP, events and replay."""
    command = [sys.executable, "-m", __name__, "--model", model, "--step-ms", str(step_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            http, events, replay = json.loads(process.stdout.readline())
            yield http, events, replay
        finally:
            process.terminate()


class StandIn:
    """`streaming`: connections whose answers are under way."""

    def __init__(self, model: str, step_s: float) -> None:
        files = resolve_model(model)
        self.model = model
        self._tokenizer = Tokenizer(files.folder, files.config.vocab_size)
        self.streaming: dict[Connection, None] = {}
        self._step_s = step_s

    def answer(self, path: str, question: dict[str, Any]) -> bytes:
        """What is asked at agreement, and again and again."""
        if path == "/metrics/":
            return METRICS.encode()
        known: dict[str, Any] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": self.model, "max_model_len": 8192}]},
        }
        if path == "/tokenize" and "prompt" in question:
            tokens = self._tokenizer.encode(question["prompt"], add_special_tokens=False)
            known[path] = {"tokens": [int(token) for token in tokens]}
        return json.dumps(known.get(path, {})).encode()

    async def step_again_and_again(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + self._step_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            for connection in list(self.streaming):
                connection.write_token()


class Connection(asyncio.Protocol):
    def __init__(self, server: StandIn) -> None:
        self._server = server
        self._received = b""
        self._left = self._next = 0
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's is no asyncio.Transport

    def connection_lost(self, error: Exception | None) -> None:
        self._server.streaming.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode().lower().split("\r\n")
        length = next((int(line.split(":")[1]) for line in lines if line.startswith("content-length:")), 0)
        if len(body) < length:
            return
        self._received = body[length:]
        path = head.split(b" ", 2)[1].decode().partition("?")[0]
        question = json.loads(body[:length]) if length else {}
        if question.get("stream"):
            self._begin(question)
        else:
            said = self._server.answer(path, question)
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said)

    def _begin(self, question: dict[str, Any]) -> None:
        self._left, self._next = question["max_tokens"], question["prompt"][-1]
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self._head = (
            b'{"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1764336000,"model":"'
            + self._server.model.encode()
            + b'","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":'
        )
        self._server.streaming[self] = None
        self.write_token()

    def write_token(self) -> None:
        self._left -= 1
        self._next = WORDS[(self._next * 7 + 1) % len(WORDS)]
        finish = b"null" if self._left else b'"length"'
        tail = b',"stop_reason":null,"prompt_token_ids":null,"token_ids":[%d]}],"usage":null}' % self._next
        self._write(self._head + finish + tail)
        if not self._left:
            self._server.streaming.pop(self)
            self._write(b"[DONE]")
            self._transport.write(b"0\r\n\r\n")

    def _write(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self._transport.write(b"%x\r\n" % len(event) + event + b"\r\n")


async def answer_replays(router: zmq.asyncio.Socket) -> None:
    """No event was ever published."""
    while True:
        client, empty, _ = await router.recv_multipart()
        await router.send_multipart([client, empty, b"", END_OF_REPLAY, b""])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--step-ms", type=float, default=40.0)
    options = parser.parse_args()
    stand_in = StandIn(options.model, options.step_ms / 1e3)
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(stand_in), HOST, 0)
    context = zmq.asyncio.Context()
    events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [listening.sockets[0].getsockname()[1]]
    ports += [socket.bind_to_random_port(f"tcp://{HOST}") for socket in (events, replay)]
    print(json.dumps(ports), flush=True)
    await asyncio.gather(stand_in.step_again_and_again(), answer_replays(replay))


if __name__ == "__main__":
    uvloop.run(main())
