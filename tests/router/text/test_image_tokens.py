import numpy as np
import pytest
from numpy.typing import NDArray

from baton_proto.images import Image, Seen, unplaced
from router.text.chat_template import SLOT, Message
from router.text.image_tokens import ImageTokens
from runtime.errors import InvalidRequestError

BEGIN, PAD, END = (
    90,
    91,
    92,
)  # added tokens: a template writes BEGIN PAD END for an image, a server makes many PADs of it
A, B = Image("a", "data:a"), Image("b", "data:b")


def array(*tokens: int) -> NDArray[np.uint32]:
    return np.array(tokens, dtype=np.uint32)


def render(messages: "list[Message]") -> NDArray[np.uint32]:
    (message,) = messages
    marks = [BEGIN, PAD, END] * message["content"].count(SLOT)
    return array(1, *marks, 2)


@pytest.fixture
def images() -> ImageTokens:
    return ImageTokens(render, {BEGIN, PAD, END})  # type: ignore[arg-type]  # reads one message


def seen(tokens: NDArray[np.uint32], *places: tuple[int, int]) -> Seen:
    return Seen(tokens.tobytes(), list(places))


def test_an_image_is_its_mark_until_a_server_has_told_its_tokens(images: ImageTokens) -> None:
    written = array(1, 5, BEGIN, PAD, END, 6, BEGIN, PAD, END, 2)
    tokens, placed = images.place("messages", written, [A, B])
    assert np.array_equal(tokens, written)
    assert [(image.offset, image.length) for image in placed] == [(2, 3), (6, 3)]
    server = array(1, 5, BEGIN, *[PAD] * 4, END, 6, BEGIN, *[PAD] * 2, END, 2)
    assert images.learn(tokens.tolist(), placed, seen(server, (3, 4), (10, 2))) == len(server)
    turned, placed = images.place("messages", array(7, BEGIN, PAD, END, BEGIN, PAD, END, 8), [B, A])
    assert turned.tolist() == [7, BEGIN, PAD, PAD, END, BEGIN, PAD, PAD, PAD, PAD, END, 8]
    assert [(image.offset, image.length) for image in placed] == [(2, 2), (6, 4)]
    assert unplaced(turned.tolist(), placed) == [7, BEGIN, PAD, END, BEGIN, PAD, END, 8]


def test_a_known_and_an_unknown_image_are_learned_together(images: ImageTokens) -> None:
    tokens, placed = images.place("messages", array(BEGIN, PAD, END), [A])
    images.learn(tokens.tolist(), placed, seen(array(BEGIN, PAD, PAD, END), (1, 2)))
    tokens, placed = images.place("messages", array(BEGIN, PAD, END, 4, BEGIN, PAD, END), [A, B])
    assert tokens.tolist() == [BEGIN, PAD, PAD, END, 4, BEGIN, PAD, END]
    images.learn(tokens.tolist(), placed, seen(array(BEGIN, PAD, PAD, END, 4, BEGIN, *[PAD] * 3, END), (1, 2), (6, 3)))
    tokens, _ = images.place("messages", array(BEGIN, PAD, END), [B])
    assert tokens.tolist() == [BEGIN, PAD, PAD, PAD, END]


def test_nothing_is_learned_of_a_server_with_other_text(images: ImageTokens) -> None:
    tokens, placed = images.place("messages", array(1, BEGIN, PAD, END, 2), [A])
    for other, place in (((1, BEGIN, PAD, PAD, END, 3), (2, 2)), ((1, 1, 1, 1, BEGIN, PAD, PAD, END, 2), (5, 2))):
        assert images.learn(tokens.tolist(), placed, seen(array(*other), place)) == len(other)
    assert images.place("messages", array(1, BEGIN, PAD, END, 2), [A])[0].tolist() == [1, BEGIN, PAD, END, 2]


def test_images_without_a_place_are_refused(images: ImageTokens) -> None:
    with pytest.raises(InvalidRequestError, match="have 2 images, and the model's chat template has places for 1"):
        images.place("messages", array(1, BEGIN, PAD, END, 2), [A, B])
    blind = ImageTokens(lambda messages: array(1, 2), {BEGIN})
    with pytest.raises(InvalidRequestError, match="has no place for them"):
        blind.place("messages", array(1, 2), [A])


def test_the_oldest_images_are_forgotten(images: ImageTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.image_tokens.MAX_KNOWN_TOKENS", 5)
    for image in (A, B):
        tokens, placed = images.place("messages", array(BEGIN, PAD, END), [image])
        images.learn(tokens.tolist(), placed, seen(array(BEGIN, PAD, PAD, PAD, END), (1, 3)))
    assert len(images.place("messages", array(BEGIN, PAD, END), [A])[0]) == 3
    assert len(images.place("messages", array(BEGIN, PAD, END), [B])[0]) == 5
