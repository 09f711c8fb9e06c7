"""Tokenizers with the added tokens of real families, and the two spellings of their marks."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from baton_proto.grammar import Grammar
from router.text.tokenizer import Tokenizer
from runtime.grammar.compiler import GrammarCompiler
from tests.scripted_model import Family
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

NUM_TOKENS = VOCAB_SIZE + 64


def with_added_tokens(folder: Path, family: Family) -> Path:
    """The tiny model's tokenizer, to which those of the family are added with their own flags."""
    path = write_tiny_model(folder) / "tokenizer.json"
    file: dict[str, Any] = json.loads(path.read_text())
    known = {token["content"] for token in file["added_tokens"]}
    marks = [(text, text in family.special) for text in (*family.special, *family.plain) if text not in known]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, (text, special) in enumerate(marks, VOCAB_SIZE):
        file["added_tokens"].append({"id": token_id, "content": text, "special": special, **flags})
    path.write_text(json.dumps(file))
    return folder


class Spelling:
    """A tokenizer, its grammars, and its texts without added tokens."""

    def __init__(self, folder: Path, family: Family) -> None:
        self.tokenizer = Tokenizer(with_added_tokens(folder / "marked", family), NUM_TOKENS)
        self._plain = Tokenizer(write_tiny_model(folder / "plain"), VOCAB_SIZE)
        self.end = self.tokenizer.matched_tokens[family.special[0]]
        self.grammars = GrammarCompiler(folder / "marked", NUM_TOKENS, [self.end])

    def tokens(self, text: str) -> list[int]:
        return [*map(int, self.tokenizer.encode(text, add_special_tokens=False))]

    def plain(self, text: str) -> list[int]:
        """Without a single added token."""
        signs = text.split("<|")  # the tiny model's own marks
        parts = [signs[0], *(part for sign in signs[1:] for part in ("<", f"|{sign}"))]
        return [int(token) for part in parts for token in self._plain.encode(part, add_special_tokens=False)]

    def lets_through(self, grammar: Grammar, tokens: list[int]) -> bool:
        """All of them, and the end behind them."""
        matcher, output = self.grammars.matcher(grammar), list[int]()
        for token in [*tokens, self.end]:
            if not np.unpackbits(matcher.mask(output).view(np.uint8), bitorder="little")[token]:
                return False
            output.append(token)
        return True
