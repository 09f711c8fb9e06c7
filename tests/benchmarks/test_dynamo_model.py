"""The model's folder as Dynamo gets it."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from benchmarks.frontend.dynamo_model import TokenizersDifferError, write_model
from router.text.text_encoder import HARD_TEXTS
from runtime.checkpoint.mock_model import MAX_POSITION


def _model(folder: Path, steps: list[pre_tokenizers.PreTokenizer]) -> Path:
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["it's 12345 years, 12 days and 12345 hours  \n\n later "] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8192}))
    return folder


DIGITS = pre_tokenizers.Digits(individual_digits=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def test_digits_are_split_by_an_expression_and_tokens_stay_what_they_were(tmp_path: Path) -> None:
    source = _model(tmp_path / "source", [DIGITS, BYTES])
    write_model(source, tmp_path / "made", "fastokens")
    made = (tmp_path / "made" / "tokenizer.json").read_text()
    assert "Digits" not in made
    ours, theirs = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json")), tokenizers.Tokenizer.from_str(made)
    for text in (*HARD_TEXTS, "a 1", "a  1", "\n 12 34\n\n5", " ²3 ", "x1y22 z's's 1's"):
        assert ours.encode(text).ids == theirs.encode(text).ids, text


@pytest.mark.parametrize("tokenizer", ["default", "fastokens"])
def test_a_tokenizer_that_dynamo_can_read_stays_as_it_is_and_the_length_limit_is_lifted(
    tokenizer: str, tmp_path: Path
) -> None:
    source = _model(tmp_path / "source", [BYTES] if tokenizer == "fastokens" else [DIGITS, BYTES])
    write_model(source, tmp_path / "made", tokenizer)
    made = tmp_path / "made"
    assert (made / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert json.loads((made / "config.json").read_text())["max_position_embeddings"] == MAX_POSITION
    assert json.loads((made / "tokenizer_config.json").read_text())["model_max_length"] == MAX_POSITION


def test_a_rewritten_tokenizer_that_splits_in_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.frontend.dynamo_model.SPLIT", r"\p{N}")
    with pytest.raises(TokenizersDifferError, match="in another way"):
        write_model(_model(tmp_path / "source", [DIGITS, BYTES]), tmp_path / "made", "fastokens")
