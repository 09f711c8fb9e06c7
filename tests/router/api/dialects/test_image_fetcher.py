"""Images by address: what is fetched is what a data URL would have brought, and what an address may not reach."""

import asyncio
import base64
import gzip
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from router.api.dialects import far_images
from router.api.dialects.far_images import fetch_images
from router.api.dialects.image_fetcher import ImageFetcher, is_public
from router.api.dialects.image_parts import FarImage
from router.api.wishes.validation import Chat
from router.requests.body_budget import BodyBudget
from router.requests.frontend import FetchImage, nobody_fetches
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError, UnavailableError
from tests.router.api.conversations import serving
from tests.router.scripted_generator import ScriptedGenerator, make_frontend
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.tiny_idefics import ADDED, know_images

PNG = b"\x89PNG" + bytes(2000)
NAME = hashlib.sha256(PNG).hexdigest()
MAX_BYTES = 64 * 1024
WHERE = "messages[0].content[0]"


class Pictures:
    """A server of them, on 127.0.0.1 as all of this machine are."""

    def __init__(self) -> None:
        self.port = 0
        self.sent = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        what = request.path[1:]
        if what.startswith("to/"):
            raise web.HTTPFound(request.query["url"])
        if what == "gzip":
            packed = gzip.compress(PNG + bytes(10**7))
            return web.Response(body=packed, content_type="image/png", headers={"content-encoding": "gzip"})
        if what == "endless":
            return await self.trickle(request, bytes(8192), 0)
        if what == "slow":
            return await self.trickle(request, b"\x89PNG", 60)
        bodies = {"a.png": PNG, "large": PNG + bytes(MAX_BYTES), "html": b"<html>", "text": b"secret=1"}
        if what not in bodies:
            raise web.HTTPNotFound
        return web.Response(body=bodies[what], content_type="text/html" if what == "html" else "image/png")

    async def trickle(self, request: web.Request, part: bytes, wait_s: float) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "image/png"})
        await answer.prepare(request)
        while True:
            await answer.write(part)
            self.sent += len(part)
            await asyncio.sleep(wait_s)

    def at(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}/{path}"


@pytest.fixture
async def pictures() -> AsyncIterator[Pictures]:
    server, app = Pictures(), web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


@pytest.fixture
async def fetch(pictures: Pictures) -> AsyncIterator[FetchImage]:
    """From the server of pictures, and from public addresses of all hosts at its port."""
    async with ImageFetcher([f"127.0.0.1:{pictures.port}", f"*:{pictures.port}"], MAX_BYTES) as fetcher:
        yield fetcher.fetch


async def fetched(fetch: FetchImage, address: str, budget_bytes: int = 1 << 22) -> Any:
    images: list[Any] = [FarImage("", address, where=WHERE)]
    with BodyBudget(budget_bytes).hold() as held:
        await fetch_images(fetch, ["text", Chat([{"role": "user", "content": "", "images": images}])], held)
    return images[0]


async def test_an_address_and_a_data_url_of_one_image_are_one_image_in_every_dialect(
    pictures: Pictures, fetch: FetchImage, tmp_path: Path
) -> None:
    know_images(write_tiny_model(tmp_path, vocab_size=VOCAB_SIZE + len(ADDED)))
    generator = ScriptedGenerator(Tokenizer(tmp_path, VOCAB_SIZE + len(ADDED)))
    frontend = replace(make_frontend(generator), fetch_image=fetch)
    data = base64.b64encode(PNG).decode()
    far, near = pictures.at("a.png"), f"data:image/png;base64,{data}"
    sources = {"type": "url", "url": far}, {"type": "base64", "media_type": "image/png", "data": data}
    parts: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [{"type": "image_url", "image_url": {"url": url}} for url in (far, near)],
        "/v1/responses": [{"type": "input_image", "image_url": url} for url in (far, near)],
        "/v1/messages": [{"type": "image", "source": source} for source in sources],
    }
    async with serving(frontend) as server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        for path, images in parts.items():
            said = [{"role": "user", "content": images}]
            body = {"model": frontend.model, "input" if path.endswith("responses") else "messages": said}
            answer = await client.post(path, json=body | {"max_tokens": 2} if "input" not in body else body)
            assert answer.status_code == 200, answer.text
            assert [(image.name, image.url) for image in generator.requests[-1].images] == [(NAME, near)] * 2


async def test_a_redirect_to_the_same_host_is_followed(pictures: Pictures, fetch: FetchImage) -> None:
    assert (await fetched(fetch, pictures.at("to/?url=/a.png"))).name == NAME


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("to/?url=http://169.254.169.254/latest/meta-data", "redirected to another host, '169.254.169.254'"),
        ("to/?url=http://127.0.0.1:9/a.png", "is at '127.0.0.1:9', which router.image_hosts does not name"),
        ("to/?url=file:///etc/passwd", "redirected to another host"),
        ("to/?url=/to/%3Furl=x", "cannot be fetched: its server answers 500"),
        ("large", f"more than the {MAX_BYTES} bytes of router.max_body_bytes"),
        ("endless", f"more than the {MAX_BYTES} bytes of router.max_body_bytes"),
        ("gzip", "must be sent as image/TYPE and not compressed, and comes as 'image/png', 'gzip'"),
        ("html", "comes as 'text/html'"),
        ("text", "is no image: its bytes begin"),
        ("none", "its server answers 404"),
    ],
)
async def test_what_is_no_image_of_this_host_is_refused(
    pictures: Pictures, fetch: FetchImage, path: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{WHERE}: .*".replace("[", r"\[")) as refused:
        await fetched(fetch, pictures.at(path))
    assert problem in str(refused.value)
    assert pictures.sent < 100 * MAX_BYTES, "nobody reads on"


async def test_a_host_that_is_not_named_outright_is_reached_at_public_addresses_alone(
    pictures: Pictures, fetch: FetchImage
) -> None:
    """`localhost` is a name that leads to this machine; the others spell its address in other ways."""
    for host in ("localhost", "127.0.0.2", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1", "0.0.0.0"):
        with pytest.raises(InvalidRequestError, match=r"cannot be fetched: .*not a (public address|canonical IPv4)"):
            await fetched(fetch, pictures.at("a.png", host))


@pytest.mark.parametrize("address", ["http://example.org/a.png", "https://127.0.0.1/", "http://a@127.0.0.1:{}/a.png"])
async def test_a_host_that_is_not_named_is_refused(pictures: Pictures, fetch: FetchImage, address: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"router\.image_hosts does not name: add it there, or send"):
        await fetched(fetch, address.format(pictures.port))
    with pytest.raises(InvalidRequestError, match=r"router\.image_hosts is empty"):
        await fetched(nobody_fetches, address)


async def test_names_of_a_domain_are_those_below_it() -> None:
    async with ImageFetcher(["*.example.org:9", "b.org"], MAX_BYTES) as fetcher:
        for address in ("http://example.org:9/", "http://badexample.org:9/", "http://a.b.org/", "http://b.org:9/"):
            with pytest.raises(InvalidRequestError, match="does not name"):
                await fetched(fetcher.fetch, address)


async def test_a_slow_server_is_not_waited_for(
    pictures: Pictures, fetch: FetchImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_images, "FETCH_S", 0.2)
    with pytest.raises(InvalidRequestError, match=r"does not come in time: all images of a request have 0.2 s"):
        await fetched(fetch, pictures.at("slow"))


async def test_what_is_fetched_counts_among_the_bytes_of_bodies(pictures: Pictures, fetch: FetchImage) -> None:
    with pytest.raises(UnavailableError, match=r"32 times router\.max_body_bytes"):
        await fetched(fetch, pictures.at("endless"), budget_bytes=32 * 1024)


def test_public_addresses_are_those_of_the_internet() -> None:
    private = "127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255"
    private += " ::1 :: fe80::1%eth0 fc00::1 ff02::1 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:7f00:1:: 2001:0:1::1"
    assert [address for address in private.split() if is_public(address)] == []
    assert all(map(is_public, ("8.8.8.8", "1.1.1.1", "2606:4700::1111")))
