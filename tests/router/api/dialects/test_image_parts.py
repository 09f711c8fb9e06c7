"""Images in every dialect: the same message of them, and the same refusals."""

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from router.api.dialects import image_parts
from router.api.dialects.image_parts import image_of
from router.api.messages.blocks import Conversation as Turns, Turn
from router.api.openai.fields import ChatMessage
from router.api.responses.items import Conversation as Items, Item
from router.api.wishes.validation import Chat
from router.text.chat_template import SLOT, Message, in_parts
from runtime.errors import InvalidRequestError

DATA = b"\x89PNG..."
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"


def user(parts: tuple[str | None, ...], image: dict[str, Any], kind: str = "text") -> bytes:
    content = [image if text is None else {"type": kind, "text": text} for text in parts]
    return msgspec.json.encode({"role": "user", "content": content})


def openai(*parts: str | None) -> Message:
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    return msgspec.json.decode(user(parts, image), type=ChatMessage).plain("messages[0]")


def responses(*parts: str | None) -> Message:
    items = Items()
    said = user(parts, {"type": "input_image", "image_url": URL}, "input_text")
    items.add("input[0]", msgspec.json.decode(said, type=Item))
    (message,) = items.end()
    return message


def messages(*parts: str | None) -> Message:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(DATA).decode()}
    turns = Turns()
    turns.add("messages[0]", msgspec.json.decode(user(parts, {"type": "image", "source": source}), type=Turn))
    (message,) = turns.messages
    return message


DIALECTS = (openai, responses, messages)


@pytest.mark.parametrize("said", DIALECTS)
def test_an_image_stands_where_it_was_among_the_texts(said: Callable[..., Message]) -> None:
    message = said("a", None, "b\n", "c", None, None)
    assert message["content"] == f"a{SLOT}b\n\nc{SLOT}{SLOT}"
    assert [(image.name, image.url) for image in message["images"]] == [(hashlib.sha256(DATA).hexdigest(), URL)] * 3
    image, text = {"type": "image"}, [{"type": "text", "text": text} for text in ("a", "b\n\nc")]
    (parts,) = in_parts([message])
    assert parts == {"role": "user", "content": [text[0], image, text[1], image, image]}


@pytest.mark.parametrize("said", DIALECTS)
def test_texts_cannot_forge_the_place_of_an_image(said: Callable[..., Message]) -> None:
    with pytest.raises(InvalidRequestError, match="has the noncharacters"):
        said(f"a{SLOT}", None)
    assert in_parts([said(f"a{SLOT}")]) == [{"role": "user", "content": f"a{SLOT}"}]


@pytest.mark.parametrize("said", DIALECTS)
def test_a_message_has_a_bounded_number_of_images(
    said: Callable[..., Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_parts, "MAX_IMAGES", 2)
    assert len(said(None, None)["images"]) == 2
    with pytest.raises(InvalidRequestError, match=r"\[2\].*: is one image too many"):
        said(None, None, None)


@pytest.mark.parametrize("url", ["", "ftp://a/b.png", "data:text/plain;base64,AAAA", "data:image/png,AAAA", URL + "?"])
def test_what_is_no_image_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"where: must be data:image/TYPE;base64"):
        image_of("where", url)


def test_a_stored_conversation_has_its_images() -> None:
    message = openai("a", None)
    stored = msgspec.json.decode(msgspec.json.encode([message]))
    assert Chat(stored).images() == Chat([message]).images() == message["images"]
