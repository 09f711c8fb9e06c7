"""Our model's folder in a form that Dynamo accepts: the same tokenizer and chat template, without weights.

Two things differ. The length limit is lifted, as it is for our mock workers. Because the fast tokenizer that is built
into Dynamo does not know the step `Digits`, it gets one expression that splits text in the same places.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from router.text.text_encoder import HARD_TEXTS
from runtime.checkpoint.mock_model import MAX_POSITION

DIGITS_THEN_BYTES = ["Digits", "ByteLevel"]
# GPT-2's expression, which ByteLevel applies by itself, for text in which every digit stands alone.
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"


class TokenizersDifferError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"the tokenizer as it was rewritten for Dynamo splits {text!r} in another way")


def write_model(source: Path, folder: Path, tokenizer: str) -> None:
    """`tokenizer`: which of Dynamo's tokenizers will read the folder. Raises TokenizersDifferError."""
    folder.mkdir()
    for name, limit in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((source / name).read_text())
        (folder / name).write_text(json.dumps(settings | {limit: MAX_POSITION}))
    if (source / "generation_config.json").exists():
        shutil.copy(source / "generation_config.json", folder)
    shutil.copy(source / "tokenizer.json", folder)
    if tokenizer == "fastokens":
        _without_digits(folder / "tokenizer.json")
        _check_same(source / "tokenizer.json", folder / "tokenizer.json")


def _without_digits(file: Path) -> None:
    """Replaces the step `Digits`; a tokenizer with other steps stays as it is."""
    document = json.loads(file.read_text())
    steps: list[dict[str, Any]] = (document["pre_tokenizer"] or {}).get("pretokenizers", [])
    if [step["type"] for step in steps] != DIGITS_THEN_BYTES or not steps[0]["individual_digits"]:
        return
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    document["pre_tokenizer"]["pretokenizers"] = [split, steps[1] | {"use_regex": False}]
    file.write_text(json.dumps(document))


def _check_same(file: Path, rewritten: Path) -> None:
    ours, theirs = (tokenizers.Tokenizer.from_file(str(one)) for one in (file, rewritten))
    for text in (*HARD_TEXTS, " ".join(HARD_TEXTS)):
        if ours.encode(text).ids != theirs.encode(text).ids:
            raise TokenizersDifferError(text)
