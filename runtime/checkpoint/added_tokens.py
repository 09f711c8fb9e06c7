"""The tokens that tokenizer_config.json and tokenizer.json add to the vocabulary, such as those that end a turn.

Prompts match every added token as a whole, whatever its flags. Those that are `special` are hidden in answers' texts
(Tokenizer.hidden_token_ids) and barred from what grammars call a text (Vocabulary). A mark of a family of tool calls or
reasoning is looked up among all of them: Qwen3's <think> and <tool_call> are not special.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from runtime.checkpoint.model_config import read_object
from runtime.errors import ModelError


class AddedToken(Struct, frozen=True):
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _Numbered(AddedToken, frozen=True):
    id: int = -1


class _TokenizerFile(Struct, frozen=True):
    added_tokens: list[_Numbered] = []


def configured(folder: Path) -> dict[int, AddedToken]:
    """By id, those of tokenizer_config.json, whose word goes before tokenizer.json's. Raises ModelError."""
    path = folder / "tokenizer_config.json"
    listed = read_object(path).get("added_tokens_decoder") if path.is_file() else None
    try:
        return msgspec.convert(listed or {}, dict[int, AddedToken], strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(str(folder), f"tokenizer_config.json: added_tokens_decoder: {error}") from error


def known(folder: Path) -> dict[int, AddedToken]:
    """All, by id. Raises ModelError."""
    return {token.id: token for token in _of_tokenizer(folder)} | configured(folder)


def id_of(folder: Path, name: str) -> int | None:
    """The id of a special token such as `eos_token`; None when no file says it. Raises ModelError."""
    path = folder / "tokenizer_config.json"
    token: Any = read_object(path).get(name) if path.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    ids = {token.content: token_id for token_id, token in configured(folder).items()}
    if text not in ids:
        ids = {token.content: token.id for token in _of_tokenizer(folder)}
    return ids.get(text)


def _of_tokenizer(folder: Path) -> list[_Numbered]:
    try:
        return msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile).added_tokens
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(str(folder), f"tokenizer.json cannot be used: {error}") from error
