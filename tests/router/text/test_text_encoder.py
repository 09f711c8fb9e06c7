from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st

from router.text import text_encoder as module
from router.text.text_encoder import HARD_TEXTS, TextEncoder, text_encoder
from runtime.errors import InvalidRequestError
from tests.tiny_model import SPECIAL_TOKENS


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def encode(tokenizer: tokenizers.Tokenizer, tiny_model: Path) -> TextEncoder:
    return text_encoder(tokenizer, tiny_model / "tokenizer.json")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from([*SPECIAL_TOKENS, *HARD_TEXTS])), max_size=6))
def test_tokens_are_those_of_the_tokenizers_library(
    tokenizer: tokenizers.Tokenizer, encode: TextEncoder, parts: list[str]
) -> None:
    text = "".join(parts)
    (tokens,) = encode([text], False)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_several_texts_are_kept_apart(encode: TextEncoder) -> None:
    first, empty, last = encode(["one two", "", "three"], False)
    assert np.array_equal(first, encode(["one two"], False)[0])
    assert len(empty) == 0
    assert np.array_equal(last, encode(["three"], False)[0])


def test_text_that_cannot_be_utf_8_is_refused(encode: TextEncoder) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        encode(["\ud800"], False)


@pytest.mark.parametrize("fault", ["cannot load", "differs"])
def test_a_fast_library_that_fails_or_differs_is_not_used(
    tokenizer: tokenizers.Tokenizer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    class Faulty:
        class Tokenizer:
            @staticmethod
            def from_file(path: str) -> "Faulty.Tokenizer":
                if fault == "cannot load":
                    raise ValueError("this kind is not supported")
                return Faulty.Tokenizer()

            def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
                return b"", b"\0" * 8 * (len(texts) + 1)

    monkeypatch.setattr(module, "fastokens", Faulty)
    encode = text_encoder(tokenizer, tiny_model / "tokenizer.json")
    assert encode(["hello"], False)[0].tolist() == tokenizer.encode("hello").ids


def test_a_text_that_the_fast_library_gives_up_on_is_tokenized_all_the_same(
    tokenizer: tokenizers.Tokenizer, encode: TextEncoder
) -> None:
    text = " " * 2_000_000
    assert encode([text], False)[0].tolist() == tokenizer.encode(text, add_special_tokens=False).ids
