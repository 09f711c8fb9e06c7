"""Folders whose only tokenizer is SentencePiece's."""

import io
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import resolve_model
from runtime.errors import ModelError
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

LINES = "\n".join(pydoc_data.topics.topics.values())[:100_000].splitlines()


def write_slow_model(folder: Path, model: bytes) -> Path:
    write_tiny_model(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(model)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def trained(kind: str, **options: Any) -> bytes:
    pieces: Any = pytest.importorskip("sentencepiece", reason="needs pip install sentencepiece")
    written = io.BytesIO()
    pieces.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=written,
        model_type=kind,
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return written.getvalue()


@pytest.mark.slow
def test_a_tokenizer_json_is_made_once_that_splits_as_sentencepiece_does(tmp_path: Path) -> None:
    model = trained("bpe")
    folder = write_slow_model(tmp_path, model)
    resolve_model(str(folder))
    made = (folder / "tokenizer.json").stat()
    resolve_model(str(folder))
    assert (folder / "tokenizer.json").stat() == made
    from sentencepiece import SentencePieceProcessor

    pieces, ours = SentencePieceProcessor(model_proto=model), Tokenizer(folder, VOCAB_SIZE)
    for line in filter(None, map(str.strip, LINES)):
        assert ours.encode(line, add_special_tokens=False).tolist() == pieces.encode(line)


@pytest.mark.slow
def test_a_conversion_that_would_split_texts_otherwise_is_refused(tmp_path: Path) -> None:
    folder = write_slow_model(tmp_path, trained("unigram"))
    with pytest.raises(ModelError, match=r"cannot be made of tokenizer\.model: .* otherwise; is tokenizer_class right"):
        resolve_model(str(folder))
    assert not list(folder.glob("*tokenizer.json*"))


def test_what_the_conversion_takes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_slow_model(tmp_path / "model", b"")
    (tmp_path / "sentencepiece.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.:proto")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing and .*: it takes .*pip install sentencepiece"):
        resolve_model(str(folder))
