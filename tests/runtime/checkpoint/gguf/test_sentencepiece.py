"""Vocabularies of SentencePiece in GGUF files."""

from typing import Any

import pytest

from runtime.checkpoint.gguf.tokenizer import build_tokenizer
from tests.runtime.checkpoint.test_slow_tokenizer import LINES, trained

ODD = ["Übung 日本語 🎉 don't", "two  spaces,\ttabs", "a\n\nb", "x = {1: 2}  # 31,024"]


def metadata(processor: Any) -> dict[str, Any]:
    """As llama.cpp's converter has it: the kinds of pieces have the same numbers."""
    ids = range(processor.vocab_size())
    kinds = {2: processor.is_unknown, 3: processor.is_control, 6: processor.is_byte}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for kind, of in kinds.items() if of(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize("begins", [True, False])
def test_texts_are_split_and_joined_as_sentencepiece_does(begins: bool) -> None:
    model = trained("bpe", add_dummy_prefix=begins)
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_proto=model)
    tokenizer = build_tokenizer(metadata(pieces) | {"tokenizer.ggml.add_space_prefix": begins}, "tiny")
    for line in [*filter(None, map(str.strip, LINES)), *ODD]:
        found = tokenizer.encode(line).ids
        assert found == [1, *pieces.encode(line)]
        assert tokenizer.decode(found) == line
