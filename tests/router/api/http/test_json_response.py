import msgspec
import pytest
from msgspec import Struct

from router.api.http import json_response
from router.api.http.json_response import encode_in_slices, encode_json


class Answer(Struct):
    text: str
    items: list[int | str] | None
    count: int = 7


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17, 40])
def test_slices_add_up_to_the_whole(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_response, "SLICE", 8)
    text = ('"\\\n😀é\0 ' * length)[:length]
    answer = Answer(text, [*range(length), *text])
    assert encode_in_slices(answer) == encode_json(answer)
    assert msgspec.json.decode(encode_in_slices(answer), type=Answer) == answer
    assert encode_in_slices(Answer(text, None)) == encode_json(Answer(text, None))
