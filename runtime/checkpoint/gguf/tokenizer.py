"""Builds a tokenizer.json from the tokenizer in the metadata of a GGUF file.

Of byte-level BPE, GGUF stores the vocabulary and the merges, but only the name of the pre-tokenizer
(`tokenizer.ggml.pre`, a name of llama.cpp's). The table below says what each name means. A name that it lacks is
refused, because a wrong split changes tokens silently; transformers' GGUF reader does not look at the name. Of
SentencePiece's BPE it stores the vocabulary with scores (sentencepiece.py).
"""

from dataclasses import dataclass
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.checkpoint.gguf.sentencepiece import Metadata, build_sentencepiece
from runtime.errors import ModelError

_WORDS = (  # the split of GPT-4 and its heirs, which differ in the longest run of digits alone
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (  # words begin where small letters end
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The meaning of one name of `tokenizer.ggml.pre`."""

    split: str | None = None  # None: the split of GPT-2, which the byte-level step includes
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word in the vocabulary is one token, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


_GPT2 = PreTokenizer()
_LLAMA3 = PreTokenizer(split=_WORDS.format(digits="{1,3}"), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": PreTokenizer(single_digits=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": PreTokenizer(split=_WORDS.format(digits=""), nfc=True),
    "tekken": PreTokenizer(split=_CASED, ignore_merges=True, add_bos=True),  # Mistral's
    "dbrx": PreTokenizer(split=_WORDS.format(digits="{1,3}")),  # Phi-4's
}

END_TEXTS = frozenset(
    [
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Control tokens that end an answer, whatever a file says of them."""


def build_tokenizer(metadata: Metadata, model: str) -> Tokenizer:
    """The tokenizer that `metadata` describes. Raises ModelError."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    match kind := metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, add_bos = _byte_level(metadata, tokens, model)
        case "llama":
            tokenizer, add_bos = build_sentencepiece(metadata, tokens, model), True
        case _:
            problem = "only byte-level BPE ('gpt2') and SentencePiece's ('llama') are supported"
            raise ModelError(model, f"its tokenizer is of kind {kind!r}; {problem}")
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    bos = special_token(metadata, "bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    return tokenizer


def _byte_level(metadata: Metadata, tokens: list[str], model: str) -> tuple[Tokenizer, bool]:
    """With whether texts begin with BOS unless the file says otherwise."""
    pre = metadata.get("tokenizer.ggml.pre", "default")  # files older than the key split as GPT-2 does
    if pre not in PRE_TOKENIZERS:
        raise ModelError(model, f"its pre-tokenizer {pre!r} is not known; known: {', '.join(PRE_TOKENIZERS)}")
    rules = PRE_TOKENIZERS[pre]
    tokenizer = Tokenizer(_bpe(tokens, metadata.get("tokenizer.ggml.merges") or [], rules, model))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(rules)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def tokenizer_settings(metadata: Metadata, max_position: int) -> dict[str, Any]:
    """tokenizer_config.json: the names of the special tokens and the chat template."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = special_token(metadata, theirs)
        if token is not None:
            settings[f"{ours}_token"] = token
    default, for_tools = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    if for_tools is not None:
        named = {"default": default, "tool_use": for_tools}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    elif default is not None:
        settings["chat_template"] = default
    return settings


def eos_token_ids(metadata: Metadata) -> list[int]:
    """The tokens that end an answer: end of sequence, of turn and of message where the file names them, and the control
    tokens of END_TEXTS, because most files name one end and their models write another one as well."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    types = metadata.get("tokenizer.ggml.token_type") or []
    tokens = zip(metadata.get("tokenizer.ggml.tokens") or [], types, strict=False)
    known = (i for i, (token, kind) in enumerate(tokens) if kind == TokenType.CONTROL and token in END_TEXTS)
    return list(dict.fromkeys(token_id for token_id in (*named, *known) if token_id is not None))


def special_token(metadata: Metadata, name: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else None


def _bpe(tokens: list[str], merges: list[str], rules: PreTokenizer, model: str) -> models.BPE:
    if not tokens or any(merge.count(" ") != 1 for merge in merges):
        raise ModelError(model, "its tokenizer has no tokens or malformed merges")
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rules.ignore_merges)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(model, f"its tokenizer cannot be built: {error}") from error


def _pre_tokenizer(rules: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
    return pre_tokenizers.Sequence(steps)


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Marks the tokens that text is searched for before BPE; they are in the vocabulary already and keep their ids."""
    added = [
        AddedToken(token, normalized=False, special=kind == TokenType.CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
