"""The vocabulary of a model as llguidance has to see it.

llguidance bars every added token of the form <...> from texts, also those that models write as text, such as Qwen3's
<think>. Here only the tokens that texts hide, and those that end answers, are barred; the others are text.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import llguidance
import msgspec
import tokenizers
from msgspec import Raw

from runtime.checkpoint import added_tokens
from runtime.checkpoint.added_tokens import AddedToken
from runtime.errors import ModelError
from runtime.grammar.matcher import EndTokens
from runtime.grammar.words.marks import Marks

_NAMELESS: Final = "\ufdd0{}"  # no character of a text, so a text that looks like a barred token is spelled by others
_EXACT: Final = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


class Vocabulary:
    """The tokens of one model, as llguidance reads them, and their marks."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """`folder`: the model's, in Hugging Face form; `vocab_size`: the model's. Holds Python's lock for up to a
        second. Raises ModelError."""
        self.eos_token_ids = sorted(eos_token_ids)
        self.ends = EndTokens(eos_token_ids, -(-vocab_size // 32))
        added = added_tokens.known(folder)
        barred = frozenset(token_id for token_id, token in added.items() if token.special) | set(eos_token_ids)
        ids = {token.content: token_id for token_id, token in added.items() if token_id not in self.eos_token_ids}
        self.marks = Marks(ids, barred)
        try:
            text = _rewritten((folder / "tokenizer.json").read_bytes(), added, barred)
            self.tokens = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=self.eos_token_ids)
        except BaseException as error:  # both libraries raise nothing narrower, and a panic of theirs is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ModelError(str(folder), f"no grammar can be followed with its tokenizer: {error}") from error


def _rewritten(data: bytes, added: Mapping[int, AddedToken], barred: Collection[int]) -> str:
    """tokenizer.json, whose added tokens are the barred ones. A vocabulary that is a list, as Unigram's, stays."""
    file: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Raw])
    model: dict[str, Any] = msgspec.json.decode(file["model"], type=dict[str, Raw])
    file |= {"truncation": None, "padding": None}
    if bytes(model["vocab"]).startswith(b"{"):
        spelled = _byte_level if b'"ByteLevel"' in bytes(file["decoder"]) else _with_word_starts
        names = {token_id: text for text, token_id in msgspec.json.decode(model["vocab"], type=dict[str, int]).items()}
        unknown = msgspec.json.decode(model.get("unk_token", b"null"))
        listed = _named(names, added, barred, unknown, spelled)
        file["model"] = model | {"vocab": {text: token_id for token_id, text in names.items()}}
        file["added_tokens"] = [
            {"id": token_id, "content": names[token_id], "special": special, **_EXACT}
            for token_id, special in sorted(listed.items())
        ]
    return msgspec.json.encode(file).decode()


def _named(
    names: dict[int, str],
    added: Mapping[int, AddedToken],
    barred: Collection[int],
    unknown: str | None,
    spelled: Callable[[str], str],
) -> dict[int, bool]:
    """Gives each token its name in the model's vocabulary. Returns whether those that have to be added are special."""
    listed = dict.fromkeys(barred, True)
    ids = {text: token_id for token_id, text in names.items()}
    for token_id, token in added.items():
        text = spelled(token.content)
        if token_id in barred:
            names[token_id] = token.content if token.content == unknown else _NAMELESS.format(token_id)
        elif ids.get(text, token_id) == token_id:
            names[token_id] = text
        else:  # another token has this text already
            names[token_id] = token.content
            listed[token_id] = False
    for token_id in range(max(names)):  # llguidance takes ids for as many as there are names, so none may lack one
        if token_id not in names:
            names[token_id] = _NAMELESS.format(token_id)
            listed[token_id] = True
    return listed


def _byte_level(text: str) -> str:
    """As byte-level BPE writes a text."""
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def _with_word_starts(text: str) -> str:
    """As SentencePiece writes a text."""
    return text.replace(" ", "▁")
