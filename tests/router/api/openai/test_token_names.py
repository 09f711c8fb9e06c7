"""What tokens are called beside their log-probabilities."""

from pathlib import Path

import pytest

from router.api.openai.token_names import TokenNames
from router.text.tokenizer import Tokenizer
from tests.router.scripted_generator import tiny_tokenizer


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return tiny_tokenizer(tiny_model)


def test_the_token_that_completes_a_character_has_all_of_it(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀b", add_special_tokens=False).tolist()
    names = TokenNames(tokenizer)
    told = [names.next(token_id) for token_id in tokens]
    assert "".join(told) == "a😀b"
    assert told[0] == "a"
    assert told.index("😀") == tokens.index(tokenizer.encode("b", add_special_tokens=False).tolist()[0]) - 1
    assert set(told[1 : told.index("😀")]) == {""}


def test_an_alternative_is_named_behind_the_tokens_so_far(tokenizer: Tokenizer) -> None:
    first, *_, last = tokenizer.encode("😀", add_special_tokens=False).tolist()
    names = TokenNames(tokenizer)
    assert names.top([(last, -1.0)], first, -2.0) == {"": -1.0}, "both are parts of a character"
    for token_id in tokenizer.encode("😀", add_special_tokens=False).tolist()[:-1]:
        names.next(token_id)
    assert (names.of(last), names.of(first)) == ("😀", "")
    a = tokenizer.encode("a", add_special_tokens=False).tolist()[0]
    assert (names.next(a), names.of(last)) == ("a", ""), "behind whole characters nothing is completed"


def test_names_may_be_ids(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer, as_ids=True)
    assert names.top([(7, float("-inf"))], 5, -2.0) == {"token_id:5": -2.0, "token_id:7": -9999.0}
    assert names.next(5) == "token_id:5"
