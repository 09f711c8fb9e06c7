"""A model folder with the shape of a real model and random weights, for measurements through the whole service."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.shapes import SHAPES, sizes_of
from runtime.checkpoint.model_config import ModelConfig
from tests.tiny_model import tiny_config, tiny_weights, write_tiny_model


def write_model(folder: Path, name: str, tokenizer: Path | None = None) -> Path:
    """Writes a folder in Hugging Face's format. `tokenizer`: a model folder, whose vocabulary the model has; None: the
    tiny model's tokenizer, because prompts are token ids."""
    if name == "tiny":
        return write_tiny_model(folder, max_position_embeddings=32768)
    shape, config = write_config(folder, name, tokenizer)
    # Names and shapes come from a model of one layer and few tokens, values from torch: numpy would take minutes.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = tiny_weights(config | {"vocab_size": 1, "num_hidden_layers": 1}, seed=0)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in small.items():
        size = (shape.vocab_size, *value.shape[1:]) if "embed_tokens" in key or "lm_head" in key else value.shape
        copies = range(shape.num_layers) if ".layers.0." in key else (0,)
        for layer in copies:
            numbers = torch.randn(size, device=device, dtype=torch.bfloat16)
            scaled = numbers * 0.1 + 1 if len(size) == 1 else numbers * size[-1] ** -0.5
            tensors[key.replace(".layers.0.", f".layers.{layer}.")] = scaled.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder: Path, name: str, tokenizer: Path | None = None) -> tuple[ModelConfig, dict[str, Any]]:
    """Writes the folder without its weights. Returns the shape, with the tokenizer's vocabulary, and config.json."""
    shape = SHAPES[name]
    if tokenizer is not None:
        known = json.loads((tokenizer / "config.json").read_text())
        shape = dataclasses.replace(shape, vocab_size=known["vocab_size"])
    config = tiny_config(shape.architecture) | sizes_of(shape)
    write_tiny_model(folder)
    if tokenizer is not None:
        for path in tokenizer.glob("*token*.json"):
            shutil.copy(path, folder)
        config["eos_token_id"] = known["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    return shape, config
