"""What the paths of files and batches refuse, and what a line of a batch is to the rest of the router."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.batches import endpoints
from router.api.batches.service import BatchService
from router.api.serving.app import create_app
from router.api.wishes.validation import LOWEST_PRIORITY
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import read_callers
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer

KEYS = {"anybody": "a" * 40, "gateway": "b" * 40}
PATH = "/v1/completions"
BODY = {"model": MODEL, "prompt": "What is", "priority": 0}
LINE = json.dumps({"custom_id": "1", "method": "POST", "url": PATH, "body": BODY})


@asynccontextmanager
async def serving(
    tiny_model: Path, tmp_path: Path, folder: bool = True
) -> AsyncIterator[tuple[Callable[..., httpx.AsyncClient], ScriptedGenerator]]:
    """Clients by the name of their key, and what they ask."""
    file = tmp_path / "keys"
    file.write_text(f"{KEYS['anybody']}\n{KEYS['gateway']} tenant=*\n")
    os.chmod(file, 0o600)
    keys = BearerKeys(read_callers(str(file), "keys"), str(file))
    generator = ScriptedGenerator(tiny_tokenizer(tiny_model))
    frontend = make_frontend(generator)
    batches = BatchService(frontend, str(tmp_path / "batches") if folder else None, keys, lambda lines: 0.0)
    app = create_app(frontend, lambda: b"", keys=keys, batches=batches)
    batches.start()

    def client(key: str = "anybody", **headers: str) -> httpx.AsyncClient:
        told = {"authorization": f"Bearer {KEYS[key]}", **headers}
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=told)

    try:
        yield client, generator
    finally:
        await batches.close()


async def brought(http: httpx.AsyncClient, content: str = LINE, **fields: str) -> httpx.Response:
    return await http.post("/v1/files", files={"file": ("l.jsonl", content)}, data={"purpose": "batch", **fields})


async def begun(http: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    file = (await brought(http)).json()["id"]
    body = {"input_file_id": file, "endpoint": PATH, "completion_window": "24h"} | changes
    return await http.post("/v1/batches", json=body)


async def test_without_a_folder_the_paths_name_the_setting(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path, folder=False) as (client, _), client() as http:
        for answer in (await brought(http), await http.get("/v1/batches"), await http.get("/v1/files/file-1/content")):
            assert answer.status_code == 404
            assert answer.json()["error"]["param"] == "router.batch_folder"


async def test_a_line_has_the_lowest_priority_and_the_tenant_that_asked_for_the_batch(
    tiny_model: Path, tmp_path: Path
) -> None:
    named = {"x-baton-tenant": "acme"}
    async with serving(tiny_model, tmp_path) as (client, generator), client("gateway", **named) as http:
        batch = (await begun(http)).json()["id"]
        deadline_s = time.monotonic() + 30
        while (ended := (await http.get(f"/v1/batches/{batch}")).json())["status"] != "completed":
            assert time.monotonic() < deadline_s, ended
            await asyncio.sleep(0.01)
        (asked,) = generator.requests
        assert (asked.priority, asked.tenant) == (LOWEST_PRIORITY, "acme")
        (line,) = (await http.get(f"/v1/files/{ended['output_file_id']}/content")).text.splitlines()
        assert json.loads(line)["response"]["body"]["choices"][0]["text"] == "Hello there."
        async with client("gateway") as nobody:
            assert (await nobody.get(f"/v1/batches/{batch}")).status_code == 404


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "tomorrow"}, "completion_window"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"windows": 1}, "windows"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused_by_its_field(
    tiny_model: Path, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    async with serving(tiny_model, tmp_path) as (client, _), client() as http:
        answer = await begun(http, **changes)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_a_file_that_cannot_be_is_refused_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MAX_FILE_BYTES", 1 << 20)
    async with serving(tiny_model, tmp_path) as (client, _), client() as http:
        for answer, status, field in (
            (await brought(http, "x" * (1 << 21)), 413, "body"),
            (await brought(http, purpose="fine-tune"), 400, "purpose"),
            (await brought(http, expires_after="1"), 400, "expires_after"),
            (await http.post("/v1/files", data={"purpose": "batch"}, files={"other": b""}), 400, "file"),
            (await http.post("/v1/files", json={}), 400, "content-type"),
        ):
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
        assert (await http.get("/v1/files")).json()["data"] == []
        assert not any((tmp_path / "batches" / "uploads").iterdir())


async def test_lists_come_in_pages(tiny_model: Path, tmp_path: Path) -> None:
    async with serving(tiny_model, tmp_path) as (client, _), client() as http:
        ids = [(await brought(http)).json()["id"] for _ in range(5)]
        first = (await http.get("/v1/files?limit=2")).json()
        assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:2:-1], True)
        rest = (await http.get(f"/v1/files?after={first['last_id']}")).json()
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
        assert (await http.get("/v1/files?order=asc&limit=1")).json()["data"][0]["id"] == ids[0]
        assert (await http.get("/v1/files?limit=0")).status_code == 400
