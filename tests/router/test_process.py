"""A router that is started by hand, without a service around it."""

import asyncio
import json
import os
from pathlib import Path

import grpc.aio
import pytest

from baton.service.local.nats_server import NatsServer
from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from runtime.config.serving import dump_config, parse_config
from runtime.processes.launch import launch_command
from runtime.processes.serving import read_ready
from runtime.security.grpc_bearer import metadata
from runtime.security.keys import VARIABLES
from runtime.security.secret import Secret

READY_TIMEOUT_S = 60.0


async def test_a_router_without_keys_makes_one_for_its_operators_and_says_where(
    tiny_model: Path, tmp_path: Path, nats_server: NatsServer
) -> None:
    sections = {"router": {"http_port": 0, "grpc_port": 0}, "logging": {"format": "json"}}
    config = parse_config({"model": str(tiny_model), "nats": {"url": nats_server.url}, **sections})
    path, log = tmp_path / "serving.yaml", tmp_path / "log"
    path.write_text(dump_config(config))
    keyless = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(*launch_command("router"), "--config", str(path), "--router-id", "router-0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=keyless,
        )
    try:
        assert process.stdout is not None
        ready = read_ready(await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S))
        assert ready is not None, log.read_text()
        (file,) = (Path(line["file"]) for line in map(json.loads, log.read_text().splitlines()) if "file" in line)
        assert file.stat().st_mode & 0o777 == 0o600
        async with grpc.aio.insecure_channel(ready.addresses["grpc"]) as channel:
            admin = pb_grpc.AdminStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="the operator key is missing"):
                await admin.Status(pb.StatusRequest(), timeout=60)
            shown = metadata(Secret(file.read_text()))
            assert (await admin.Status(pb.StatusRequest(), timeout=60, metadata=shown)).router_id == "router-0"
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), READY_TIMEOUT_S) == 0, log.read_text()
    assert not file.parent.exists()
