"""What a web page may ask of a service on its reader's machine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.api.http.server import serve_http
from router.api.http.web_pages import WebPages
from router.api.serving.app import create_app
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.router.http_client import COMPLETION
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

PAGE = "https://chat.example.org"
EVIL = "http://evil.example"
HOST = "localhost:8000"

Headers = list[tuple[bytes, bytes]]


def headers(**values: str) -> Headers:
    return [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in values.items()]


def code(pages: WebPages, fields: Headers, method: str = "GET") -> str | None:
    refused = pages.refusal({"type": "http", "method": method, "path": "/ui/tree", "headers": fields})
    return None if refused is None else refused[1].code


def open_service(origins: tuple[str, ...] = (), insecure: bool = False) -> WebPages:
    return WebPages("10.0.0.7", origins, asks_for_key=False, insecure=insecure)


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST:8000", "localhost.:8000", "a.localhost", "127.0.0.1:1")),
        *((host, True) for host in ("127.9.9.9", "[::1]:8000", "[::1]", "10.0.0.7:8000")),
        *((host, False) for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", "")),
        *(
            (host, False)
            for host in ("10.0.0.8", "[::2]:80", "::1", "localhost@evil.example", "evil.example#localhost")
        ),
    ],
)
def test_a_service_without_keys_answers_to_its_own_names(host: str, ours: bool) -> None:
    assert code(open_service(), headers(host=host)) == (None if ours else "foreign_host")
    twice = headers(host="localhost") + headers(host=host)
    assert (code(open_service(), twice) is None) == ours
    assert code(open_service(insecure=True), headers(host=host)) is None, "reached by names that nobody here knows"
    with_keys = WebPages("127.0.0.1", (), asks_for_key=True, insecure=False)
    assert code(with_keys, headers(host=host, origin=EVIL)) is None, "no page has a key"


def test_who_names_no_host_is_no_browser() -> None:
    assert code(open_service(), []) is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
@pytest.mark.parametrize("origin", [EVIL, "null", "", "http://localhost:3000", "http://localhost:80000", "http://[::1"])
@pytest.mark.parametrize("insecure", [False, True])
def test_foreign_pages_are_refused_whatever_they_ask(method: str, origin: str, insecure: bool) -> None:
    pages = open_service((PAGE,), insecure)
    assert code(pages, headers(host=HOST, origin=origin), method) == "foreign_origin"
    assert code(pages, headers(host=HOST, origin=PAGE) + headers(origin=origin), method) == "foreign_origin"
    for own in (PAGE, f"http://{HOST}"):
        assert code(pages, headers(host=HOST, origin=own), method) is None
    assert code(open_service(("*",), insecure), headers(host=HOST, origin=origin), method) is None


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        *((kind, True) for kind in ("application/json", "Application/JSON; charset=utf-8")),
        *((kind, False) for kind in ("text/plain", "text/plain; a=application/json", "application/json-seq", "")),
        *((kind, False) for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None)),
    ],
)
@pytest.mark.parametrize("length", [headers(content_length="2"), headers(transfer_encoding="chunked")])
@pytest.mark.parametrize("asks_for_key", [False, True])
def test_a_body_is_said_to_be_json(kind: str | None, taken: bool, length: Headers, asks_for_key: bool) -> None:
    pages = WebPages("127.0.0.1", (), asks_for_key, insecure=False)
    fields = length + ([] if kind is None else headers(content_type=kind))
    assert code(pages, fields, "POST") == (None if taken else "unsupported_media_type")
    assert code(pages, headers(content_length="0"), "POST") is None, "`POST /sleep` has no body"


def test_a_file_comes_in_a_form_and_from_no_foreign_page() -> None:
    pages, form = WebPages("127.0.0.1", (), False, insecure=False), {"content_type": "multipart/form-data; boundary=x"}
    scope = {"type": "http", "path": "/v1/files", "method": "POST"}
    assert pages.refusal(scope | {"headers": headers(host=HOST, content_length="2", **form)}) is None
    foreign = pages.refusal(scope | {"headers": headers(host=HOST, origin="https://evil.example", **form)})
    assert foreign is not None
    assert foreign[1].code == "foreign_origin"


@pytest.fixture
async def http(tiny_model: Path) -> AsyncIterator[httpx.AsyncClient]:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    app = create_app(frontend, lambda: b"", pages=open_service((PAGE,)))
    async with (
        await serve_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        yield client


async def test_a_refusal_says_what_would_do(http: httpx.AsyncClient) -> None:
    plain = {"content-type": "text/plain", "origin": PAGE}
    answers = [
        await http.post("/v1/completions", content=b"{}", headers=plain),
        await http.post("/v1/messages", json={}, headers={"origin": EVIL}),
        await http.options("/v1/completions", headers={"origin": EVIL, "access-control-request-method": "POST"}),
        await http.get("/health", headers={"host": "evil.example"}),
    ]
    assert [answer.status_code for answer in answers] == [415, 403, 403, 403]
    said = [answer.json()["error"]["message"] for answer in answers]
    assert said[0].endswith("send the body as JSON with `content-type: application/json`")
    assert "name it in router.cors_origins, or give the service a key: security.api_key_file" in said[1]
    assert "'evil.example' is none of this service's names, which are localhost and router.host" in said[3]


async def test_a_page_that_is_named_may_ask(http: httpx.AsyncClient) -> None:
    before = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    assert (await http.options("/v1/completions", headers=before)).status_code == 200
    answer = await http.post("/v1/completions", json=COMPLETION, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)


async def test_with_a_key_pages_and_names_do_not_matter(tiny_model: Path) -> None:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    keys, with_keys = BearerKeys.plain([Secret("k" * 32)]), WebPages("127.0.0.1", (), asks_for_key=True, insecure=False)
    app = create_app(frontend, lambda: b"", keys=keys, pages=with_keys)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://baton.example", transport=transport) as http:
        shown = {"origin": EVIL, "authorization": f"Bearer {'k' * 32}"}
        assert (await http.get("/v1/models", headers=shown)).status_code == 200
        assert (await http.get("/v1/models", headers={"origin": EVIL})).status_code == 401


SPELLINGS = (
    "{}",
    "{}/",
    "/{}",
    "{}%2f",
    "{}/.",
    "/x/..{}",
    "/health/..{}",
    "/ui/requests/..{}",
    "{}?a=/health",
    "{};a",
)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/tokenize", "/%74okenize", "/TOKENIZE", "/metrics", "/v1/tokenize"]
)
@pytest.mark.parametrize("method", ["POST", "GET", "HEAD", "OPTIONS"])
async def test_however_a_path_is_spelled_it_asks_for_the_key(tiny_model: Path, path: str, method: str) -> None:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    app = create_app(frontend, lambda: b"", keys=BearerKeys.plain([Secret("k" * 32)]))
    async with await serve_http(app, "127.0.0.1", 0) as server:
        for spelling in SPELLINGS:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(f"{method} {spelling.format(path)} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 401 "), spelling
            writer.close()
