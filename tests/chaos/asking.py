"""The clients: ways to ask, patient and not. Each way is one row of WAYS."""

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import h11

from baton.client.lasting_stream import lasting
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from tests.chaos import grammars
from tests.chaos.judging.verdict import Outcome
from tests.chaos.plan import Ask

DEADLINE_S = 40.0  # of a request
HUNG_GRACE_S = 10.0  # beyond it
PAUSE_S = 0.1  # between two attempts to go on
CUT_SHORT = "the response ended before the answer did"
READ_BYTES = 16384
SLOW_READ_BYTES = 256
SLOW_PAUSE_S = 0.01
FINISHES = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


@dataclass(frozen=True, slots=True)
class Door:
    """Where one router listens."""

    name: str
    grpc: Client
    http: tuple[str, int]
    model: str
    key: str = ""  # of the callers, where they need one


Way = Callable[[Door, Ask, Outcome], Awaitable[None]]


async def ask(door: Door, what: Ask) -> Outcome:
    """Never raises: what went wrong is part of the outcome."""
    outcome = Outcome(what, door.name, time.monotonic())
    try:
        await asyncio.wait_for(WAYS[what.way][1](door, what, outcome), DEADLINE_S + HUNG_GRACE_S)
    except grpc.aio.AioRpcError as error:
        outcome.end, outcome.code, outcome.details = "error", error.code().name, error.details() or ""
    except TimeoutError:  # an OSError too, therefore first
        outcome.end = "hung"
    except (OSError, EOFError, h11.RemoteProtocolError) as error:
        outcome.end, outcome.code, outcome.details = "error", "CONNECTION", repr(error)
    outcome.end_s = time.monotonic()
    return outcome


def grpc_request(what: Ask) -> pb.GenerateRequest:
    grammar = None if what.grammar is None else grammars.over_grpc(what.grammar)
    sampling = pb.SamplingOptions(**what.sampling, grammar=grammar)
    return pb.GenerateRequest(model=what.model, tokens=pb.TokenIds(ids=what.prompt), sampling=sampling)


async def _grpc(door: Door, what: Ask, outcome: Outcome, leaves: bool = False, pause_s: float = 0.0) -> None:
    outcome.tokens = []
    stream = door.grpc.stream(grpc_request(what), DEADLINE_S)
    async with contextlib.aclosing(stream):  # type: ignore[type-var]
        async for response in stream:
            if response.WhichOneof("event") == "piece":
                outcome.tokens += response.piece.token_ids
                outcome.text += response.piece.text
                outcome.finish = FINISHES.get(response.piece.finish_reason, "")
            if leaves and len(outcome.tokens) >= what.after:
                outcome.end = "left"
                return
            if pause_s:
                await asyncio.sleep(pause_s)
            if response.WhichOneof("event") == "finished":
                outcome.end = "done"
    if outcome.end != "done":
        outcome.end, outcome.details = "error", "the stream ended before the answer did"


async def _grpc_resumes(door: Door, what: Ask, outcome: Outcome) -> None:
    outcome.tokens = []
    request = grpc_request(what)
    async with contextlib.aclosing(lasting(door.grpc, request, DEADLINE_S)) as stream:
        async for response in stream:
            outcome.may_resume = bool(request.resume_from)
            if response.WhichOneof("event") == "piece":
                outcome.tokens += response.piece.token_ids
                outcome.text += response.piece.text
                outcome.finish = FINISHES.get(response.piece.finish_reason, "")
            if response.WhichOneof("event") == "finished":
                outcome.end = "done"
    if outcome.end != "done":
        outcome.end, outcome.details = "error", "the stream ended before the answer did"


async def _http_resumes(door: Door, what: Ask, outcome: Outcome) -> None:
    """Asks again with the last event's id when the stream breaks off, and waits as long as `lasting` does."""
    deadline_s = time.monotonic() + DEADLINE_S
    while outcome.end != "done":
        outcome.end, outcome.code, outcome.details = "hung", "", ""
        try:
            await _http(door, what, outcome, stream=True, resumes=True)
        except (OSError, EOFError, h11.RemoteProtocolError):
            if not outcome.may_resume:
                raise
        if outcome.end == "error" and outcome.details != CUT_SHORT:
            return
        if not outcome.may_resume or time.monotonic() > deadline_s:
            return
        await asyncio.sleep(PAUSE_S)


async def _http(
    door: Door, what: Ask, outcome: Outcome, stream: bool, leaves: str = "", slow: bool = False, resumes: bool = False
) -> None:
    body = {"model": what.model or door.model, "prompt": list(what.prompt), "stream": stream, **what.sampling}
    body |= {} if what.grammar is None else grammars.over_http(what.grammar)
    connection = socket.socket()
    connection.setblocking(False)
    if slow:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    if leaves == "RST":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    with connection:
        await asyncio.get_running_loop().sock_connect(connection, door.http)
        if leaves:
            outcome.end = "left"
        got = 0
        async for data in _exchange(connection, door.key, body, outcome, slow, resumes):
            got += len(data)
            if leaves and got > what.after * 20:
                outcome.end = "left"
                return
            if stream and data.strip() != b"[DONE]":
                _take(outcome, json.loads(data), stream)
            elif stream:
                outcome.end = "done"
            else:
                _take(outcome, json.loads(data), stream)
    if outcome.end not in ("done", "error"):
        outcome.end, outcome.details = "error", CUT_SHORT


def _take(outcome: Outcome, message: dict[str, Any], stream: bool) -> None:
    if "error" in message:
        outcome.code = outcome.code or str(message["error"].get("code") or message["error"].get("type"))
        outcome.end, outcome.details = "error", str(message["error"].get("message"))
        return
    for choice in message["choices"]:
        outcome.text += choice["text"]
        outcome.finish = choice["finish_reason"] or outcome.finish
    if not stream:
        outcome.end = "done"


async def _exchange(
    connection: socket.socket, key: str, body: dict[str, Any], outcome: Outcome, slow: bool, resumes: bool
) -> AsyncIterator[bytes]:
    """The events of a stream, or the whole body. An error status becomes the outcome's code."""
    loop = asyncio.get_running_loop()
    data = json.dumps(body).encode()
    http = h11.Connection(h11.CLIENT)
    headers = [("host", "localhost"), ("content-type", "application/json"), ("content-length", str(len(data)))]
    headers += [("authorization", f"Bearer {key}")] if key else []
    headers += [("accept", "text/event-stream")] if resumes else []
    headers += [("last-event-id", outcome.last_id)] if outcome.last_id else []
    head = http.send(h11.Request(method="POST", target="/v1/completions", headers=headers))
    await loop.sock_sendall(connection, (head or b"") + (http.send(h11.Data(data)) or b""))
    http.send(h11.EndOfMessage())
    events, rest = False, b""
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            if slow:
                await asyncio.sleep(SLOW_PAUSE_S)
            http.receive_data(await loop.sock_recv(connection, SLOW_READ_BYTES if slow else READ_BYTES))
        elif isinstance(event, h11.Response):
            events = event.status_code == 200 and b"event-stream" in dict(event.headers).get(b"content-type", b"")
            outcome.code = "" if event.status_code == 200 else str(event.status_code)
        elif isinstance(event, h11.Data):
            rest += bytes(event.data)
            while events and b"\n\n" in rest:
                message, _, rest = rest.partition(b"\n\n")
                if message.startswith(b":"):
                    continue  # a comment, while the model wakes
                *more, data = message.split(b"\n")
                yield data.removeprefix(b"data:").strip()
                for line in more:  # the event is taken, and has an id
                    outcome.last_id, outcome.may_resume = line.removeprefix(b"id:").strip().decode(), True
        else:
            raise EOFError(f"{event} in the middle of a response")
    if not events:
        yield rest


WAYS: dict[str, tuple[float, Way]] = {
    "gRPC": (6, _grpc),
    "gRPC, leaves": (1, lambda door, what, outcome: _grpc(door, what, outcome, leaves=True)),
    "gRPC, reads slowly": (1, lambda door, what, outcome: _grpc(door, what, outcome, pause_s=SLOW_PAUSE_S)),
    "HTTP stream": (2, lambda door, what, outcome: _http(door, what, outcome, stream=True)),
    "HTTP": (1, lambda door, what, outcome: _http(door, what, outcome, stream=False)),
    "HTTP, leaves with FIN": (1, lambda door, what, outcome: _http(door, what, outcome, stream=True, leaves="FIN")),
    "HTTP, leaves with RST": (1, lambda door, what, outcome: _http(door, what, outcome, stream=True, leaves="RST")),
    "HTTP, reads slowly": (1, lambda door, what, outcome: _http(door, what, outcome, stream=True, slow=True)),
}
RESUMING: dict[str, tuple[float, Way]] = {
    "gRPC, resumes": (6, _grpc_resumes),
    "HTTP stream, resumes": (6, _http_resumes),
    "HTTP": WAYS["HTTP"],
}
WEIGHTS = {name: weight for name, (weight, _) in WAYS.items()}
WAYS |= RESUMING


def weights(shared_ports: bool) -> dict[str, float]:
    """Where one of several routers may answer clients go on at another one."""
    return {name: weight for name, (weight, _) in RESUMING.items()} if shared_ports else WEIGHTS
