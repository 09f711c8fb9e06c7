"""Writes a tiny random model in Hugging Face form: what every test serves that needs no real answer.

Made without torch and in milliseconds. The weights are scaled so that greedy output varies from token to token and the
best two logits are far enough apart that two correct float32 implementations choose the same token.
"""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_TOKEN_IDS = [2, 0]
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT = """
A relay race is won by the team whose baton crosses the line first, not by the fastest runner alone. The first runner
leaves the blocks and builds up speed; the second one waits, starts to move while the other is still coming, and
reaches back without looking. For a few metres both of them hold the baton, and then only one does. If it falls, both
have lost. What is the capital of France? The capital of France is Paris. What does a system, a user and an assistant
say to each other? The user asks a question, the assistant answers it, and the system tells both how to behave.
Numbers such as 1, 2, 3, 10, 42, 100 and 2048 are written with digits. In the morning the streets are empty and the
shops are closed; in the evening there is light behind every window. She said that they would have been there before,
but this time nothing happened. People who work together know which part of the work is theirs. Some questions have
one answer, others have many, and a good question is worth more than a quick answer. Übung macht den Meister; ça va
très bien; el niño come una manzana.
"""


def write_tiny_model(folder: Path, *, architecture: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Fills `folder` (created when missing) and returns it. `overrides` are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture) | overrides
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_TOKEN_IDS, "pad_token_id": 0}
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": IM_START,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    save_file(tiny_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_config(architecture: str) -> dict[str, Any]:
    """config.json of the tiny model: 4 layers of 64, 4 query and 2 KV heads of 16."""
    return {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors under Hugging Face's names: variance 1 in, variance 1 out of every projection."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    def norm(size: int) -> np.ndarray:
        return np.float32(1) + random.standard_normal(size, dtype=np.float32) * np.float32(0.1)

    hidden, mlp, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    # A token's embedding must not dominate, or the next token would depend on the last one alone.
    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, gain=hidden**0.5)}
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": norm(hidden),
            "self_attn.q_proj": matrix(query, hidden, gain=2),  # sharp attention, so that the context matters
            "self_attn.k_proj": matrix(kv, hidden, gain=2),
            "self_attn.v_proj": matrix(kv, hidden, gain=2),
            "self_attn.o_proj": matrix(hidden, query, gain=2),
            "post_attention_layernorm": norm(hidden),
            "mlp.gate_proj": matrix(mlp, hidden, gain=2),
            "mlp.up_proj": matrix(mlp, hidden, gain=2),
            "mlp.down_proj": matrix(hidden, mlp, gain=2),
        }
        if config["model_type"] == "qwen2":
            sizes = {"q_proj": query, "k_proj": kv, "v_proj": kv}
            biases = {f"self_attn.{name}.bias": norm(size) for name, size in sizes.items()}
            weights |= {f"model.layers.{index}.{name}": value for name, value in biases.items()}
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": norm(head_dim) * 1.5, "self_attn.k_norm": norm(head_dim) * 1.5}
        weights |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(
            config["vocab_size"], hidden, gain=4
        )  # logits with a standard deviation of 4
    return {name: value.astype(np.float32) for name, value in weights.items()}


@functools.cache
def _tokenizer_json() -> str:
    """A byte-level BPE of exactly VOCAB_SIZE tokens, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text: str = tokenizer.to_str(pretty=False)
    return text


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
