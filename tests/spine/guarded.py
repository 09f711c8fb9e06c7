"""`baton up` with keys, TLS and a planner on the mock engine, and what each of its ports is for."""

import json
import os
import secrets
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import trustme
import yaml

from baton.cli.terminal.exit_codes import ExitCode
from runtime.config.step_times import StepTimes
from runtime.security.cluster_key import ClusterKey
from runtime.security.secret import Secret
from tests.service import assert_gone

BATON = [sys.executable, "-m", "baton"]


@dataclass
class Guarded:
    """A running service and all that may be known of it."""

    process: "subprocess.Popen[str]"
    folder: Path
    api_key: str
    cluster: ClusterKey
    lines: list[dict[str, Any]]  # of `baton up`
    kinds: dict[int, str]  # by port: what is to be expected there

    @property
    def ca(self) -> bytes:
        return (self.folder / "ca.pem").read_bytes()

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.ca.decode())

    @property
    def flags(self) -> list[str]:
        """With which a user's commands are let in."""
        return ["--api-key-file", str(self.folder / "api"), "--ca-file", str(self.folder / "ca.pem")]

    def ports(self, *kinds: str) -> list[int]:
        return [port for port, kind in self.kinds.items() if kind in kinds]

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.ports('grpc')[0]}"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports('http')[0]}"

    def processes(self) -> list[psutil.Process]:
        up = psutil.Process(self.process.pid)
        return [up, *up.children(recursive=True)]

    def run(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """A command of `baton` in the shell of the user who started the service."""
        return subprocess.run(
            [*BATON, *arguments], env=environment(self.folder) | variables, capture_output=True, text=True
        )

    def target(self, nats_url: str) -> Any:
        """Of the planner's first decision. Each question for it takes a second."""
        while (target := json.loads(self.run("plan", "--json", "--nats-url", nats_url).stdout)["target"]) is None:
            pass
        return target

    def ask(self) -> "subprocess.CompletedProcess[str]":
        question = ["chat", "Who is there?", "--max-tokens", "8", "--json"]
        return self.run(*question, "--address", self.grpc_address, *self.flags)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(folder)}


@contextmanager
def guarded_service(folder: Path, **security: Any) -> Iterator[Guarded]:
    api_key = secrets.token_hex(16)
    (folder / "api").write_text(f"{secrets.token_hex(16)}\n{api_key}\n")
    (folder / "api").chmod(0o600)
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    own = ca.issue_cert("127.0.0.1")
    (folder / "cert.pem").write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
    own.private_key_pem.write_to_path(folder / "key.pem")
    config = {
        "model": "mock",
        "router": {"http_port": 0, "grpc_port": 0, "placement": {"local_prefill_tokens": 0}},
        "step_times": msgspec.to_builtins(StepTimes().faster(10)),
        "transfer": {"transport": "tcp"},
        "planner": {"enabled": True},
        "security": {
            "api_key_file": str(folder / "api"),
            "tls_cert_file": str(folder / "cert.pem"),
            "tls_key_file": str(folder / "key.pem"),
            **security,
        },
    }
    (folder / "serving.yaml").write_text(yaml.safe_dump(config))
    arguments = ["up", "--json", "--config", str(folder / "serving.yaml"), "--log-dir", str(folder / "logs")]
    with (folder / "up.log").open("w") as stderr:
        process = subprocess.Popen(
            [*BATON, *arguments], env=environment(folder), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdout is not None
    pids: set[int] = set()
    try:
        lines = []
        for line in process.stdout:
            lines.append(json.loads(line))
            if lines[-1]["event"] == "planner":
                break
        else:
            raise AssertionError((folder / "up.log").read_text())
        cluster = ClusterKey(Secret((folder / "baton" / "default" / "cluster.key").read_text()))
        service = Guarded(process, folder, api_key, cluster, lines, {})
        service.kinds = kinds_of(service)
        pids = {one.pid for one in service.processes()}
        yield service
        process.terminate()
        told = process.stdout.read()
        assert process.wait(60) == ExitCode.OK
        assert '"lost"' not in told, told + (folder / "up.log").read_text()
        assert not list((folder / "baton").iterdir())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        assert_gone(pids)


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    return [(one.laddr.ip, one.laddr.port) for one in process.net_connections("inet") if one.status == "LISTEN"]


def kinds_of(service: Guarded) -> dict[int, str]:
    """What each port that is told of is for. The decode worker tells its KV port to prefill workers alone."""
    told: dict[str, str] = {}
    for line in service.lines:
        told |= {address: kind for kind, address in line.get("addresses", {}).items()}
    told[service.lines[-1]["metrics"]] = "metrics"
    kinds = {int(address.removesuffix("/metrics").rpartition(":")[2]): kind for address, kind in told.items()}
    pid = next(line["pid"] for line in service.lines if line.get("id") == "decode-1")
    (kv_port,) = {port for _, port in listening(psutil.Process(pid))} - set(kinds)
    return kinds | {kv_port: "kv"}
