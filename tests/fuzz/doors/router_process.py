"""The router's two servers over a scripted generator: `python -m tests.fuzz.doors.router_process MODEL_FOLDER`.

Prints the ports as JSON, and ends when its standard input does. Logs of errors are JSON lines on standard error.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvloop

from baton_proto.generated import inference_pb2 as pb
from router.api.http.server import serve_http
from router.api.serving.grpc_api import GrpcApi
from runtime.config.surroundings import LoggingConfig
from runtime.security.secret import Secret
from runtime.telemetry.logging import configure_logging
from tests.fuzz.doors.http2_frames import OPERATOR
from tests.router.api.conversations import app_of
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer


async def status() -> pb.StatusResponse:
    return pb.StatusResponse(router_id="router-1")


async def serve(folder: Path) -> None:
    configure_logging(LoggingConfig(level="error", format="json"), "router-1")
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(folder), ["It is 42, she said. " * 20]))
    grpc = GrpcApi(frontend, make_questions(status), operators=[Secret(OPERATOR)])
    port = await grpc.start("127.0.0.1", 0)
    async with await serve_http(app_of(frontend), "127.0.0.1", 0) as http:
        print(json.dumps({"http": http.port, "grpc": port}), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await grpc.stop()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
