from pathlib import Path

import numpy as np
import pytest

from router.text.tokenizer import Tokenizer
from runtime.checkpoint.mock_model import answer_vocabulary, mock_files
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import MockConfig, ServingConfig
from runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))


def byte_tokenizer() -> Tokenizer:
    files = mock_files(MockConfig())
    return Tokenizer(files.folder, files.config.vocab_size)


def test_each_byte_of_a_text_is_a_token() -> None:
    text = "Übung macht den Meister"
    tokens = byte_tokenizer().encode(text)
    assert len(tokens) == len(text.encode())
    assert byte_tokenizer().decode(tokens.tolist()) == text


def test_chat_messages_are_framed_by_special_tokens() -> None:
    tokens = byte_tokenizer().chat([{"role": "user", "content": "hi"}])
    assert np.count_nonzero(tokens == 1) == 2  # <|im_start|> of the user and of the assistant
    assert np.count_nonzero(tokens == 2) == 1


def test_answers_are_text() -> None:
    files = mock_files(MockConfig())
    tokenizer = Tokenizer(files.folder, files.config.vocab_size)
    text = "".join(tokenizer.token_text(token_id) for token_id in answer_vocabulary(files, MockConfig()))
    assert text == "abcdefghijklmnopqrstuvwxyz "


def test_the_tokenizer_is_written_once() -> None:
    folder = mock_files(MockConfig()).folder
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert mock_files(MockConfig()).folder == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


def test_a_real_models_tokenizer_can_be_borrowed(tiny_model: Path) -> None:
    config = MockConfig(tokenizer=str(tiny_model))
    files = served_model(ServingConfig(model="mock", mock=config))
    assert (files.folder, files.name) == (tiny_model, "mock")
    assert not files.eos_token_ids & set(answer_vocabulary(files, config))


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError):
        mock_files(MockConfig(tokenizer="no-such-model"))
