"""A client that stops reading, over real sockets: its sequence stops on the worker, and goes on exactly when it reads
on."""

import asyncio
import json
import socket
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from baton_proto.sampling import TokenLogprobs
from baton_proto.worker import Delta, Submit
from router.api.http.server import serve_http
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from router.text.tokenizer import Tokenizer
from router.workers.account import LoadView
from tests.router.http_client import CHAT
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import make_frontend
from tests.router.scripted_worker import ScriptedWorker, greedy, next_token, tokens_of
from tests.router.small_router import PROMPT, Router, routing, text_of

NUM_TOKENS = 3000
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


async def with_logprobs(worker: ScriptedWorker, submit: Submit) -> None:
    """With so many logprobs that the answer does not fit into the sockets."""
    token_ids = tokens_of(submit)
    last = submit.num_prompt_tokens + submit.sampling.max_tokens
    while len(token_ids) < last:
        await asyncio.sleep(0)
        token_ids.append(next_token(token_ids))
        logprobs = [TokenLogprobs(-1.0, [(token_id, -1.0) for token_id in range(40, 60)])]
        finish = "length" if len(token_ids) == last else None
        worker.send(Delta(submit.request_id, token_ids=token_ids[-1:], logprobs=logprobs, finish=finish))


async def paused(router: Router, decode: ScriptedWorker) -> None:
    async with asyncio.timeout(60):
        while not decode.cancels:
            await asyncio.sleep(0.02)
    (worker,) = router.pool.workers.values()
    assert router.ledger.view(worker.key) == LoadView(0, 0, 0)


@pytest.mark.slow
async def test_over_http(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0", script=with_logprobs)
    async with routing(tokenizer, decode) as router:
        app = create_app(make_frontend(cast(Any, router.generator)), lambda: b"")
        async with await serve_http(app, "127.0.0.1", 0) as server:
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_connect(peer, (server.host, server.port))
            reader, writer = await asyncio.open_connection(sock=peer, limit=1024)
            asked = {"max_tokens": NUM_TOKENS, "temperature": 0, "stream": True, "logprobs": True, "top_logprobs": 20}
            body = json.dumps(CHAT | asked).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            await paused(router, decode)
            answer = b""
            while piece := await asyncio.wait_for(reader.read(1 << 16), 60):
                answer += piece
            writer.close()
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
    assert text == text_of(tokenizer, greedy(tokens_of(decode.submits[0]), NUM_TOKENS))


@pytest.mark.slow
async def test_over_grpc(tokenizer: Tokenizer) -> None:
    decode = ScriptedWorker("d0", script=with_logprobs)
    async with routing(tokenizer, decode) as router:
        api = GrpcApi(make_frontend(cast(Any, router.generator)), make_questions(cast(Any, None)))
        port = await api.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=SMALL_WINDOW) as channel:
            sampling = pb.SamplingOptions(max_tokens=NUM_TOKENS, temperature=0, logprobs=20)
            call = pb_grpc.InferenceStub(channel).Generate(
                pb.GenerateRequest(tokens=pb.TokenIds(ids=PROMPT), sampling=sampling)
            )
            await paused(router, decode)
            token_ids = [token_id async for response in call for token_id in response.piece.token_ids]
        await api.stop()
    assert token_ids == greedy(PROMPT, NUM_TOKENS)
