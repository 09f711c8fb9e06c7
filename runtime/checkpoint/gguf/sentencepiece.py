"""Builds a tokenizer of SentencePiece's BPE from the vocabulary in the metadata of a GGUF file.

SentencePiece merges the neighbours whose union has the best score, and spells what is in no token in bytes. Where the
file says that texts begin with a space, so does what follows a special token, as in llama.cpp.
"""

from operator import itemgetter
from typing import Any

from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers

from runtime.errors import ModelError

Metadata = dict[str, Any]
"""GGUF key -> Python value."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def build_sentencepiece(metadata: Metadata, tokens: list[str], model: str) -> Tokenizer:
    """Without special tokens. Raises ModelError."""
    scores = metadata.get("tokenizer.ggml.scores") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    if not tokens or not len(tokens) == len(scores) == len(types):
        raise ModelError(model, f"its tokenizer has {len(tokens)} tokens, {len(scores)} scores and {len(types)} types")
    kinds = list(zip(tokens, scores, types, strict=True))
    ranked = sorted(((-score, token) for token, score, kind in kinds if kind == TokenType.NORMAL), key=itemgetter(0))
    unknown = next((token for token, _, kind in kinds if kind == TokenType.UNKNOWN), None)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [pair for _, token in ranked for pair in _halves(token, ids)]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    begins = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_space = [normalizers.Prepend(_SPACE)] if begins else []
    tokenizer.normalizer = normalizers.Sequence([*to_space, normalizers.Replace(" ", _SPACE)])
    from_space = [decoders.Strip(" ", 1, 0)] if begins else []
    spelled = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spelled, *from_space])
    return tokenizer


def _halves(token: str, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that are `token` together."""
    pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
    return sorted((pair for pair in pairs if pair[0] in ids and pair[1] in ids), key=lambda pair: ids[pair[0]])
