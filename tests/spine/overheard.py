"""`python -m tests.spine.overheard MODE`, in a network namespace of its own: a service of which everything listens
beyond the loopback interface, with `security.internal_tls: MODE`, and a listener on the wire (AF_PACKET, which wants
root). Prints as JSON which secrets were heard, of those that went over the wire."""

import asyncio
import json
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trustme

from baton_proto.generated import inference_pb2 as pb
from runtime.config.step_times import StepTimes
from runtime.security.cluster_key import NATS
from tests.service import Service, running_service

ADDRESS = "10.99.0.1"
ETH_P_ALL = 3
SO_RCVBUFFORCE = 33


class Ear:
    """Every packet on the loopback device, which is the way of all packets between addresses of one machine."""

    def __init__(self) -> None:
        self._heard = bytearray()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._socket.bind(("lo", 0))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            self._heard += self._socket.recv(1 << 17)

    async def heard(self) -> bytes:
        """All packets that were sent before this call."""
        mark = secrets.token_bytes(16)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(mark, (ADDRESS, 9))
        async with asyncio.timeout(30):
            while mark not in self._heard:
                await asyncio.sleep(0.01)
        return bytes(self._heard)


async def overheard(mode: str, folder: Path) -> dict[str, Any]:
    ca = trustme.CA()
    own = ca.issue_cert(ADDRESS)
    own.private_key_and_cert_chain_pem.write_to_path(folder / "pair.pem")
    pair = str(folder / "pair.pem")
    security = {"internal_tls": mode, "tls_cert_file": pair, "tls_key_file": pair, "insecure": True}
    ear = Ear()
    async with running_service(
        "mock",
        step_times=msgspec.to_builtins(StepTimes().faster(1000)),
        workers={"host": ADDRESS, "per_process": 1},
        router={"host": ADDRESS, "placement": {"local_prefill_tokens": 0}},
        transfer={"transport": "tcp"},
        security=security,
    ) as service:
        prompt = [secrets.randbelow(200) for _ in range(40)]
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt))
        answer = await service.client.generate(request, 30)
        assert answer.served_by[0].transport == "tcp"
        metrics = await scrape(service)
        said = {
            "prompt": [struct.pack("<40I", *prompt)],
            "tokens": runs_of(list(answer.token_ids)),
            "workers": [b"decode-1"],
            "nats login": [service.supervisor.keys.cluster.derive(NATS).reveal().encode()],  # type: ignore[union-attr]
            "metrics": [metrics.splitlines()[0].encode()],
        }
        heard = await ear.heard()
    return {
        "heard": [name for name, forms in said.items() if any(form in heard for form in forms)],
        "bytes": len(heard),
    }


def runs_of(token_ids: list[int]) -> list[bytes]:
    """Any eight tokens in a row: which of an answer's tokens leave in one message depends on the machine's speed."""
    encoded = list(map(msgspec.msgpack.encode, token_ids))
    return [b"".join(encoded[i : i + 8]) for i in range(len(encoded) - 7)]


async def scrape(service: Service) -> str:
    """A scraper trusts the CA that it was given."""
    cluster = service.supervisor.keys.cluster
    assert cluster is not None
    scheme, trust, extensions = "http", None, {}
    if cluster.tls is not None:
        scheme, trust = "https", cluster.tls.client()
        extensions = {"sni_hostname": cluster.tls.name}
    async with httpx.AsyncClient(verify=True if trust is None else trust) as client:
        url = f"{scheme}://{service.supervisor.ready['decode-1'].addresses['metrics']}/metrics"
        answer = await client.get(url, headers={"accept-encoding": "identity"}, extensions=extensions)
        assert answer.status_code == 200
        return answer.text


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(overheard(sys.argv[1], Path(folder)))))


if __name__ == "__main__":
    main()
