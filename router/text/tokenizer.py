"""The model's tokenizer: text and chat messages to token ids, token ids to bytes. Shared by requests and threads.

It needs the `tokenizers` library alone; transformers, which imports torch, stays out of the router.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from router.text.chat_template import NESTED, Ending, Message, load_chat_template
from router.text.control_tokens import ControlTokens
from router.text.image_tokens import ImageTokens
from router.text.segment_cache import SegmentCache, Unfinished, boundary_pattern
from router.text.text_encoder import HARD_TEXTS, TokenIds, text_encoder
from runtime.checkpoint import added_tokens
from runtime.checkpoint.added_tokens import AddedToken
from runtime.errors import InvalidRequestError, ModelError

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MAX_LOCKED_TOKENS = 1024  # `decode` of the library keeps Python's lock for 0.4 us a token, `decode_batch` lets it go
_WORD_START = "▁"  # SentencePiece's sign for the space before a word


class Tokenizer:
    def __init__(
        self, folder: Path, vocab_size: int, marks: Collection[str] = (), parse_control_tokens: bool = False
    ) -> None:
        """`folder` has Hugging Face form; `vocab_size` is the model's, at least the tokenizer's. `marks`: see
        ControlTokens. `parse_control_tokens`: also those that messages spell out count. Raises ModelError."""
        self.vocab_size = vocab_size
        self._tokenizer, as_in_file = _load(folder)
        self._template = load_chat_template(folder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._encode = text_encoder(self._tokenizer, folder / "tokenizer.json" if as_in_file else None)
        self._segments = SegmentCache(self._encode, boundary_pattern(added.values()))
        control = () if parse_control_tokens else added.values()
        self._control = ControlTokens(control, self._template.source, marks)
        # Prompts match all added tokens; texts hide the special ones. What grammars bar is for their Vocabulary to say.
        self.matched_tokens = {token.content: token_id for token_id, token in added.items()}
        self.hidden_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.max_token_chars = max(map(len, vocabulary), default=1)
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        self.is_byte_level = decoder.get("type") == "ByteLevel"  # else text depends on more than each token's own bytes
        self._has_byte_fallback = "ByteFallback" in json.dumps(decoder)
        self._token_bytes = _Table(self._spell)
        self._shown = _Table(lambda token_id: b"" if token_id in self.hidden_token_ids else self.token_bytes(token_id))
        if self.is_byte_level:  # cheap, and the first answers would have to wait for it
            self._token_bytes.update((token_id, _bytes_of_byte_level(token)) for token, token_id in vocabulary.items())
            self._shown.update(self._token_bytes)
            self._shown.update(dict.fromkeys(self.hidden_token_ids, b""))
        self._token_texts: dict[int, str] = {}
        self.images = ImageTokens(self.chat, added)

    def encode(self, text: str, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`, [num_tokens]; special tokens that are spelled out in it are recognised."""
        return self._encode([text], add_special_tokens)[0]

    def begin_chat(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        max_chars: int | None = None,
        ending: Ending = "answer",
    ) -> Unfinished:
        """Renders the model's chat template. Raises InvalidRequestError, also when the text is longer than
        `max_chars`."""
        try:
            plain = self._control.plain(messages, variables)
        except RecursionError as error:
            raise InvalidRequestError("messages", NESTED) from error
        text = self._template.render(plain.messages, plain.variables, ending, max_chars)
        return self._segments.begin(text, plain.separator)

    @property
    def chat_template(self) -> str:
        """Its source, and that of the one for tools; empty: there is none."""
        return self._template.source

    def template_reads(self, variable: str) -> bool:
        return variable in self._template.variables

    def finish_chat(self, text: Unfinished) -> TokenIds:
        return self._segments.finish(text)

    def chat(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> TokenIds:
        """Renders and tokenizes in one call."""
        return self.finish_chat(self.begin_chat(messages, variables))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) <= MAX_LOCKED_TOKENS:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special tokens spelled out; empty for ids that the tokenizer lacks."""
        return self._token_bytes[token_id]

    def shown_bytes(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that tokens add to a text, where special tokens have none. For byte-level BPE only."""
        shown = self._shown
        return b"".join([shown[token_id] for token_id in token_ids])

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; a part of a character gives U+FFFD."""
        known = self._token_texts.get(token_id)
        if known is None:
            known = self._token_texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return known

    def is_byte_fallback(self, token_id: int) -> bool:
        """The token is one of <0x00> to <0xFF>, which byte-fallback tokenizers join with neighbours into characters."""
        return (
            self._has_byte_fallback
            and _BYTE_FALLBACK.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None
        )

    def _spell(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._has_byte_fallback and (match := _BYTE_FALLBACK.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if _WORD_START in token:
            return token.replace(_WORD_START, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


class _Table(dict[int, bytes]):
    """Bytes by token id; a token is spelled when it is first asked for."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes:
        spelled = self[token_id] = self._spell(token_id)
        return spelled


def _load(folder: Path) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it is as tokenizer.json says alone. Raises ModelError."""
    wanted = {token_id: _library_token(token) for token_id, token in added_tokens.configured(folder).items()}
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = tokenizer.get_added_tokens_decoder()
        changed = {
            token_id: token for token_id, token in sorted(wanted.items()) if repr(known.get(token_id)) != repr(token)
        }
        tokenizer.add_tokens(list(changed.values()))
        tokenizer.encode_batch(HARD_TEXTS)  # a vocabulary that lacks its own [UNK] fails here, not in a request
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(str(folder), f"tokenizer.json cannot be used: {error}") from error
    for token_id, token in changed.items():
        if (found := tokenizer.token_to_id(token.content)) != token_id:
            problem = f"{token.content!r} is token {token_id}, and {found} after those of tokenizer.json"
            raise ModelError(str(folder), f"tokenizer_config.json: {problem}")
    tokenizer.no_truncation()  # some files carry the settings of their training
    tokenizer.no_padding()
    return tokenizer, not changed


def _library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(**msgspec.structs.asdict(token))


def _byte_level_alphabet() -> dict[int, int]:
    """Character -> byte of byte-level BPE as GPT-2 defined it: printable Latin-1 stands for itself, the characters from
    U+0100 for the other bytes in order. The Latin-1 characters of those other bytes stand for no byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, _NO_BYTE) | {256 + i: byte for i, byte in enumerate(others)}


_NO_BYTE = 0xFFFF
_BYTE_OF = _byte_level_alphabet()


def _bytes_of_byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet is taken as plain text, as the library's own decoder does."""
    try:
        return token.translate(_BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
