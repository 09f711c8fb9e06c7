import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from router.api.http.server import serve_http
from router.api.http.web_pages import WebPages
from router.api.pages.tokenization import IN_PLACE_TOKENS
from router.api.serving.app import create_app
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.router.http_client import USER
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer

TEXT = "It is 42, she said: ça va, 😀!"
PAGE = "https://chat.example.org"
KEY = {"authorization": "Bearer sesame-sesame-sesame"}


@pytest.fixture
def generator(tiny_model: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(tiny_model))


@pytest.fixture
async def http(generator: ScriptedGenerator) -> AsyncIterator[httpx.AsyncClient]:
    """Shows its API key."""
    pages = WebPages("127.0.0.1", [PAGE], asks_for_key=True, insecure=False)
    keys = BearerKeys.plain([Secret("sesame-sesame-sesame")])
    app = create_app(make_frontend(generator), lambda: b"", keys=keys, pages=pages)
    async with await serve_http(app, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=KEY) as client:
            yield client


async def test_a_text_becomes_tokens_and_a_text_again(http: httpx.AsyncClient, generator: ScriptedGenerator) -> None:
    asked = {"model": MODEL, "prompt": TEXT, "add_special_tokens": False, "return_token_strs": True}
    answer = (await http.post("/tokenize", json=asked)).json()
    expected = generator.tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    assert (answer["tokens"], answer["count"]) == (expected, len(expected))
    assert answer["max_model_len"] == generator.max_model_len
    assert answer["token_strs"] == [generator.tokenizer.token_text(token) for token in expected]
    assert (await http.post("/detokenize", json={"tokens": expected})).json() == {"prompt": TEXT}


async def test_many_tokens_are_spelled_and_written_beside_the_event_loop(
    http: httpx.AsyncClient, generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, threads = generator.tokenizer.token_text, set()

    def token_text(token_id: int) -> str:
        threads.add(threading.current_thread())
        return known(token_id)

    monkeypatch.setattr(generator.tokenizer, "token_text", token_text)
    generator.max_model_len = 4096
    text = "<|im_end|>" * (IN_PLACE_TOKENS + 1)
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["token_strs"] == ["<|im_end|>"] * answer["count"]
    assert answer["count"] == IN_PLACE_TOKENS + 1
    assert threads.isdisjoint([threading.main_thread()])
    assert (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": text}


async def test_a_chat_becomes_the_tokens_that_its_completion_would_have(
    http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    answer = (await http.post("/tokenize", json={"messages": USER})).json()
    assert answer["tokens"] == generator.tokenizer.chat(USER).tolist()
    assert answer["token_strs"] is None
    assert not generator.requests


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "a", "promt": "b"}, "promt"),
        ("/tokenize", {"prompt": "a " * 100_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "ghost", "content": "a"}]}, "messages[0].role"),
        ("/tokenize", {"prompt": "a", "model": "another"}, "another"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, object], field: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert field in answer.json()["error"]["message"]


async def test_the_description_resolves_and_names_what_is_served(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    paths = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"}
    assert paths <= described["paths"].keys()
    assert {"input", "instructions", "temperature"} <= schemas["ResponsesBody"]["properties"].keys()
    assert {"messages", "system", "max_tokens", "thinking"} <= schemas["MessagesBody"]["properties"].keys()
    assert not {"background", "user"} & schemas["ResponsesBody"]["properties"].keys()
    assert {"temperature", "messages", "tools"} <= schemas["ChatBody"]["properties"].keys()
    assert "functions" not in schemas["ChatBody"]["properties"], "it is refused"
    assert described["info"]["version"] == (await http.get("/version")).json()["version"]

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [name for value in node.values() for name in references(value)]
        return [name for value in node for name in references(value)] if isinstance(node, list) else []

    assert {name.rpartition("/")[2] for name in references(described)} <= schemas.keys()


async def test_a_pages_preflight_needs_no_key_and_its_request_does(http: httpx.AsyncClient) -> None:
    ask = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    del http.headers["authorization"]
    allowed = await http.options("/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert (await http.options("/v1/chat/completions", headers=ask | {"origin": "https://evil.example"})).is_error
    refused = await http.post("/tokenize", json={"prompt": "a"}, headers={"origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE
    assert (await http.post("/ping")).status_code == 200
    assert (await http.get("/version")).status_code == 401
