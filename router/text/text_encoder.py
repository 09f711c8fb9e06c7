"""Text to token ids, by the fastest library that is installed.

`tokenizers` is always installed. `fastokens`, which has no wheels for some platforms, is five times as fast for
byte-level BPE; it is used when it agrees with `tokenizers` on texts that are hard to split.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import tokenizers

from runtime.errors import InvalidRequestError

try:
    import fastokens
except ImportError:
    fastokens = None

TokenIds = npt.NDArray[np.uint32]
TextEncoder = Callable[[Sequence[str], bool], list[TokenIds]]
"""(texts, add_special_tokens) -> [num_tokens] of each. Raises InvalidRequestError for what cannot be UTF-8."""

HARD_TEXTS = (
    "",
    " ",
    "Hello, world! It's 12345.67 (don't you think?)",
    "  two  spaces,\ttabs\r\n\r\n\nand   lines \n ",
    "Übung macht den Meister; ça va; e\u0301 and \u00e9; ﬁne; Ⅷ; ²",
    "你好，世界。日本語のテキスト 한국어 العربية עברית हिन्दी",
    "🎉👩\u200d👩\u200d👧 \U0001f1e9\U0001f1ea \ufeff\u200b\u00a0\u3000 \x00\x7f",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF], \"b\": x ** 2}  # comment\n",
    "https://example.org/a_b-c?d=1&e=%20 ____ ---- .... aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)

log = structlog.get_logger()


def text_encoder(tokenizer: tokenizers.Tokenizer, file: Path | None) -> TextEncoder:
    """`file`: tokenizer.json, of which `tokenizer` was made; None: no file has all of it."""
    plain = _plain_encoder(tokenizer)
    if fastokens is None or file is None:
        return plain
    try:
        fast = _fast_encoder(fastokens.Tokenizer.from_file(str(file)))
        problem = _disagreement(fast, plain, [token.content for token in tokenizer.get_added_tokens_decoder().values()])
    except Exception as error:  # what fastokens cannot do, tokenizers can
        problem = str(error) or type(error).__name__
    if problem:
        log.info("fastokens is not used", file=str(file), reason=problem)
        return plain

    def encode(texts: Sequence[str], add_special_tokens: bool) -> list[TokenIds]:
        try:
            return fast(texts, add_special_tokens)
        except ValueError:  # a million spaces are too many for its regular expressions
            return plain(texts, add_special_tokens)

    return encode


def _plain_encoder(tokenizer: tokenizers.Tokenizer) -> TextEncoder:
    def encode(texts: Sequence[str], add_special_tokens: bool) -> list[TokenIds]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    return _refusing(encode)


def _fast_encoder(tokenizer: Any) -> TextEncoder:
    def encode(texts: Sequence[str], add_special_tokens: bool) -> list[TokenIds]:
        ids, offsets = tokenizer.encode_batch_flat(list(texts), add_special_tokens=add_special_tokens)
        tokens, ends = np.frombuffer(ids, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").tolist()
        return [tokens[start:end] for start, end in pairwise(ends)]

    return _refusing(encode)


def _refusing(encode: TextEncoder) -> TextEncoder:
    def refusing(texts: Sequence[str], add_special_tokens: bool) -> list[TokenIds]:
        try:
            return encode(texts, add_special_tokens)
        except (TypeError, UnicodeError) as error:  # lone surrogates cannot be UTF-8
            raise InvalidRequestError("prompt", "the text is not valid Unicode") from error

    return refusing


def _disagreement(fast: TextEncoder, plain: TextEncoder, special: Sequence[str]) -> str:
    """Says where the two encoders differ; empty when they agree."""
    texts = [*HARD_TEXTS, *(f"a {token}\n b{token}{token} c" for token in special[:64]), " ".join(HARD_TEXTS)]
    for add_special_tokens in (False, True):
        for text, ours, theirs in zip(
            texts, plain(texts, add_special_tokens), fast(texts, add_special_tokens), strict=True
        ):
            if not np.array_equal(ours, theirs):
                return f"it splits {text!r} in another way"
    return ""
