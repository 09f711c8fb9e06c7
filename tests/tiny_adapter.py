"""Writes a LoRA adapter of a tiny model in PEFT's form, with random weights that change its answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK = 8
MODULES = ("q_proj", "v_proj", "o_proj")
SIZE = 0.5  # of a weight: enough for another answer


def write_tiny_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """Fills `folder` (created when missing) and returns it. `model`: the folder of what it is made for."""
    config = json.loads((model / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0}
    told |= {"bias": "none", "target_modules": list(MODULES), "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    save_file(_weights(config, np.random.default_rng(seed)), folder / "adapter_model.safetensors")
    return folder


def _weights(config: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    hidden, heads, head_dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    query, values = heads * head_dim, config["num_key_value_heads"] * head_dim
    shapes = {"q_proj": (hidden, query), "v_proj": (hidden, values), "o_proj": (query, hidden)}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (width, out) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (RANK, width)), ("lora_B", (out, RANK))):
                weights[f"{name}.{part}.weight"] = random.normal(0, SIZE, shape).astype(np.float32)
    return weights
