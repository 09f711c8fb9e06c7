"""The files of `model: mock`, which has no weights. Its tokenizer is another model's, or the byte tokenizer: one token
per byte, written once into the cache folder.
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from runtime.checkpoint.model_cache import made_folder
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.checkpoint.rope_config import Rope
from runtime.config.serving import MockConfig

MOCK = "mock"
BYTES = "bytes"
END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BYTE_TOKENIZER_VERSION = 1
MAX_POSITION = 1 << 20  # the pool and engine.max_model_len set the real limit
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWER_TEXT = "abcdefghijklmnopqrstuvwxyz "  # the characters of answers with the byte tokenizer


def mock_files(config: MockConfig, progress: bool = False) -> ModelFiles:
    """Raises what `resolve_model` raises for a tokenizer that is not `bytes`."""
    if config.tokenizer == BYTES:
        folder = made_folder(f"byte-tokenizer-v{BYTE_TOKENIZER_VERSION}", _write_byte_tokenizer)
        vocab_size, eos_token_ids = len(byte_vocabulary()), frozenset({SPECIAL_TOKENS.index(IM_END)})
    else:
        lender = resolve_model(config.tokenizer, progress)
        folder, vocab_size, eos_token_ids = lender.folder, lender.config.vocab_size, lender.eos_token_ids
    return ModelFiles(folder, MOCK, _shape(vocab_size), eos_token_ids)


def answer_vocabulary(files: ModelFiles, config: MockConfig) -> list[int]:
    """The tokens of answers: letters of the byte tokenizer, or all tokens of another that do not end an answer."""
    if config.tokenizer == BYTES:
        vocabulary = byte_vocabulary()
        return [vocabulary[_spelled(character)] for character in ANSWER_TEXT]
    return [token_id for token_id in range(files.config.vocab_size) if token_id not in files.eos_token_ids]


def byte_vocabulary() -> dict[str, int]:
    """Special tokens first, then the 256 bytes as byte-level BPE spells them."""
    spellings = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    return {spelling: token_id for token_id, spelling in enumerate(spellings)}


def _spelled(character: str) -> str:
    return "Ġ" if character == " " else character


def _shape(vocab_size: int) -> ModelConfig:
    """One layer of 8 bytes of KV per token, so that transfers have something to carry."""
    return ModelConfig(
        architecture=MOCK,
        vocab_size=vocab_size,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position=MAX_POSITION,
        rms_norm_eps=1e-6,
        rope=Rope(10000.0, 2),
        tie_word_embeddings=True,
        dtype="float16",
    )


def _write_byte_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {"bos_token": IM_START, "eos_token": IM_END, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
