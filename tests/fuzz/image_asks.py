"""Images among the parts of messages, in the three dialects that have them: good and broken data URLs, addresses of all
kinds, and texts that look like an image's place."""

import atexit
import base64
import functools
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from router.api.dialects.image_fetcher import ImageFetcher
from router.text.chat_template import SLOT
from router.text.tokenizer import Tokenizer
from tests.fuzz.asked_targets import loop, posted
from tests.fuzz.hostile_asks import BODIES, Draw, size, text
from tests.router.api.conversations import app_of
from tests.router.scripted_generator import ScriptedGenerator, make_frontend
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.tiny_idefics import ADDED, MARK, know_images

NAMED = "127.0.0.1:1"  # where nobody listens: no other host is asked for an image
BEGINNINGS = (b"\x89PNG", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF....WEBP", b"....ftypavif", b"", b"<svg>")
ADDRESSES = (
    f"http://{NAMED}/a.png",
    f"HTTP://{NAMED}:1/",
    f"http://a@{NAMED}",
    f"http://{NAMED}@example.org/",
    "http://[::1]:1/",
    "http://[",
    "http://",
    "http:// /",
    "https://example.org:99999/",
    "http://\u2488\u2488.example/",
    "http://a\\@b/#?",
    "file:///etc/passwd",
)
FORMS = (
    *["data:image/png;base64,{}"] * 20,
    "data:image/x+y.z-1;base64,{}",
    "DATA:image/png;base64,{}",
    "data:;base64,{}",
    "{}",
)


@functools.cache
def _client() -> httpx.AsyncClient:
    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    know_images(write_tiny_model(folder, vocab_size=VOCAB_SIZE + len(ADDED)))
    frontend = make_frontend(ScriptedGenerator(Tokenizer(folder, VOCAB_SIZE + len(ADDED))))
    fetcher = loop().run_until_complete(ImageFetcher([NAMED], frontend.config.max_body_bytes).__aenter__())
    atexit.register(lambda: loop().run_until_complete(fetcher.__aexit__(None, None, None)))
    transport = httpx.ASGITransport(app_of(replace(frontend, fetch_image=fetcher.fetch)), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)


def images(data: bytes) -> object:
    """PATH, a zero, and the body."""
    return posted(_client(), data)


def _url(chance: random.Random) -> Any:
    data = base64.b64encode(chance.choice(BEGINNINGS) + chance.randbytes(size(chance, 5))).decode()
    spelled = chance.choice((*[data] * 12, data[:-1], data + "=", f" {data}", "\u00e9"))
    whole = chance.choice(FORMS).format(spelled)
    return chance.choice((*[whole] * 24, chance.choice(ADDRESSES), "http://" + text(chance), None, 1, [], {}, ""))


def _openai(chance: random.Random) -> Any:
    url = _url(chance)
    return {"type": "image_url", "image_url": chance.choice((url, {"url": url}, {"url": url, "detail": "low"}))}


def _responses(chance: random.Random) -> Any:
    return {
        "type": "input_image",
        "image_url": _url(chance),
        **chance.choice(({}, {"detail": "auto"}, {"file_id": "a"})),
    }


def _messages(chance: random.Random) -> Any:
    data, url = base64.b64encode(chance.choice(BEGINNINGS)).decode(), _url(chance)
    sources = {"type": "base64", "media_type": "image/png", "data": data}, {"type": "url", "url": url}, url
    return {"type": "image", "source": chance.choice(sources)}


def _body(image: Draw, kind: str, field: str, limit: str) -> Draw:
    def draw(chance: random.Random) -> Any:
        def part() -> Any:
            if chance.random() < 0.6:
                return image(chance)
            return {"type": kind, "text": chance.choice((SLOT, MARK, f"{MARK}\n{SLOT}", text(chance)[:200], ""))}

        def message() -> Any:
            role = chance.choice(("user",) * 6 + ("assistant", "system", "tool"))
            return {"role": role, "content": [part() for _ in range(size(chance, 1))]}

        most = [image(chance)] * chance.choice((64, 65)) if chance.random() < 0.05 else []
        told = [message() for _ in range(chance.randint(1, 3))]
        return {"model": "tiny", limit: 16, field: [*told, {"role": "user", "content": most or [part()]}]}

    return draw


IMAGES: dict[str, Draw] = dict(
    zip(
        BODIES,
        (
            _body(_openai, "text", "messages", "max_tokens"),
            _body(_messages, "text", "messages", "max_tokens"),
            _body(_responses, "input_text", "input", "max_output_tokens"),
        ),
        strict=True,
    )
)
"""Path -> a body for it."""
