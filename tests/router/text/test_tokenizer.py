import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError, ModelError
from tests.router.scripted_generator import tiny_tokenizer
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France? €"}]


def test_text_and_messages_give_the_tokens_that_transformers_gives(tiny_model: Path, tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(tiny_model)
    text = "The first runner leaves the blocks.<|im_end|>\n\n Übung 😀 12345"
    assert tokenizer.encode(text).tolist() == reference.encode(text)
    wanted = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat(MESSAGES).tolist() == wanted
    assert tokenizer.chat(MESSAGES).dtype == np.uint32


@given(text=st.text(st.characters(codec="utf-8"), max_size=50))
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == text.encode()


def test_special_tokens_are_known_and_spelled_out_by_themselves(tokenizer: Tokenizer) -> None:
    assert tokenizer.hidden_token_ids == {0, 1, 2}
    assert tokenizer.encode("<|im_end|>").tolist() == [2]
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.decode([2]) == ""


def with_added_tokens(folder: Path, tokens: dict[str, dict[str, object]]) -> Path:
    """Tokens that stand in tokenizer_config.json alone."""
    path = write_tiny_model(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": tokens}))
    return folder


def test_tokens_that_tokenizer_config_json_adds_are_those_of_transformers(tmp_path: Path) -> None:
    added = {
        "0": {"content": "<|endoftext|>", "special": True, "normalized": False},
        "300": {"content": " the", "special": False, "normalized": False, "rstrip": True},
        str(VOCAB_SIZE): {"content": "<tool>", "special": False, "normalized": False},
        str(VOCAB_SIZE + 1): {"content": "<|turn|>", "special": True, "normalized": False, "lstrip": True},
    }
    plain = tiny_tokenizer(write_tiny_model(tmp_path / "plain"))
    added["300"]["content"] = plain.decode([300])
    folder = with_added_tokens(tmp_path / "added", added)
    tokenizer, reference = Tokenizer(folder, VOCAB_SIZE + 2), AutoTokenizer.from_pretrained(folder)
    text = f"Say it:  <|turn|> <tool> x{plain.decode([300])}  y<|im_end|>"
    assert tokenizer.encode(text).tolist() == reference.encode(text)
    assert {VOCAB_SIZE, VOCAB_SIZE + 1, 300} <= set(tokenizer.encode(text).tolist())
    assert plain.encode(text).tolist() != tokenizer.encode(text).tolist()
    assert tokenizer.hidden_token_ids == {0, 1, 2, VOCAB_SIZE + 1}
    assert tokenizer.decode([VOCAB_SIZE, VOCAB_SIZE + 1]) == "<tool>"


@pytest.mark.parametrize("tokens", [{"700": {"content": "<tool>"}}, {"x": {"content": "y"}}, {"512": {}}, ["<tool>"]])
def test_added_tokens_that_cannot_be_are_refused(tmp_path: Path, tokens: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: "):
        tiny_tokenizer(with_added_tokens(tmp_path, tokens))


def test_ids_that_only_the_model_has_are_empty(tiny_model: Path) -> None:
    padded = Tokenizer(tiny_model, VOCAB_SIZE + 64)
    assert padded.vocab_size == VOCAB_SIZE + 64
    assert padded.token_bytes(VOCAB_SIZE + 1) == b""


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        tokenizer.encode("\ud800")


def test_settings_of_training_do_not_cut_or_pad_prompts(tiny_model: Path, tmp_path: Path) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "a relay race is won by the team"
    assert tiny_tokenizer(tmp_path).encode(text).tolist() == tiny_tokenizer(tiny_model).encode(text).tolist()


def test_a_broken_tokenizer_file_is_an_error_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, 10)


def test_threads_may_share_it(tokenizer: Tokenizer) -> None:
    texts = [f"runner number {i} is next " * 50 for i in range(32)]
    with ThreadPoolExecutor(4) as pool:
        assert [tokens.tolist() for tokens in pool.map(tokenizer.encode, texts)] == [
            tokenizer.encode(text).tolist() for text in texts
        ]


def test_the_apis_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, router.api.serving.app, router.api.serving.grpc_api;"
        " sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
