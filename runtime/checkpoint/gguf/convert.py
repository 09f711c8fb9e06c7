"""Converts a GGUF file into a folder in Hugging Face form.

Tensors become float32, exactly as `gguf` de-quantises them. Because their order in the file is that in which the engine
fuses them (q, k, v; gate, up), workers map fused weights straight from the file and share them through the page cache.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import structlog
from gguf import GGUFReader, ReaderTensor, dequantize
from rich.console import Console
from rich.progress import Progress

from runtime.checkpoint.families import FAMILIES, Family
from runtime.checkpoint.gguf.sentencepiece import Metadata
from runtime.checkpoint.gguf.tokenizer import (
    build_tokenizer,
    eos_token_ids,
    special_token,
    tokenizer_settings,
)
from runtime.checkpoint.model_config import parse_model_config
from runtime.errors import ModelError

log = structlog.get_logger()

LAYER_TENSORS = {  # GGUF name -> Hugging Face's, in file order: tensors that are fused lie side by side
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FUSED_TENSORS = {  # the same of a family whose tensors are fused in checkpoints, too
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_TENSORS = LAYER_TENSORS | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
GEMMA_27B = (46, 62)  # layers of Gemma 2's and 3's, which alone scale queries by another size than a head's
BIASED = ("attn_q", "attn_k", "attn_v")


def convert(source: Path, folder: Path, progress: bool) -> None:
    """Writes config, tokenizer and weights of `source` into the empty `folder`. Raises ModelError, OSError."""
    model = str(source)
    with _progress_bar(source.name, progress) as advance:
        metadata, tensors = _read(source)
        config = _config(metadata, tensors, model)
        parse_model_config(config, model)  # refuses now what loading would refuse later
        names = _tensor_names(config)
        _check_names(set(tensors), set(names.values()), model)
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(metadata))
        _write_json(folder / "tokenizer_config.json", tokenizer_settings(metadata, config["max_position_embeddings"]))
        (folder / "tokenizer.json").write_text(build_tokenizer(metadata, model).to_str(), encoding="utf-8")
        with (folder / "model.safetensors").open("wb") as file:
            _write_tensors(file, {name: tensors[theirs] for name, theirs in names.items()}, config, model, advance)


def _read(source: Path) -> tuple[Metadata, dict[str, ReaderTensor]]:
    try:
        reader = GGUFReader(source)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # the file is truncated, or no GGUF file
        raise ModelError(str(source), f"is not a readable GGUF file: {error}") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(metadata: Metadata, tensors: dict[str, ReaderTensor], model: str) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    known = [name for name, family in FAMILIES.items() if family.gguf]
    if architecture not in known:
        problem = f"architecture {architecture!r} is not read from .gguf files, only {', '.join(known)}"
        raise ModelError(model, f"{problem}: take the model's safetensors")

    if FAMILIES[architecture].is_fused and metadata.get("tokenizer.ggml.model") == "llama":
        problem = "Phi-3's SentencePiece vocabulary is not read, because its marks take the spaces behind them"
        raise ModelError(model, f"{problem}: take the model's safetensors")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(model, f"its metadata lacks {architecture}.{key}")
        return value

    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(model, "keys, values and rotary embedding of different sizes are not supported")
    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(model, f"rope scaling {scaling!r} is not implemented for GGUF files")
    others = _gemma(get, architecture, head_dim) if FAMILIES[architecture].scales == "gemma" else {}
    if scaling == "linear":
        others["rope_scaling"] = {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    return {
        "architectures": [FAMILIES[architecture].hf_class],
        "model_type": architecture,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": FAMILIES[architecture].activation,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "sliding_window": get("attention.sliding_window", 0) or None,
        "attention_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
        **others,
    }


def _gemma(get: Callable[..., Any], architecture: str, head_dim: int) -> dict[str, Any]:
    """Raises ModelError."""
    get("attention.sliding_window")  # must be there, and what follows
    is_wide = get("block_count") in GEMMA_27B
    scalar = get("embedding_length") // get("attention.head_count") if is_wide else head_dim
    caps = ("attn_logit_softcapping", "final_logit_softcapping") if architecture == "gemma2" else ()
    local = {"rope_local_base_freq": get("rope.freq_base_swa", 10000.0)}
    return {"query_pre_attn_scalar": scalar, **local, **{key: get(key) for key in caps}}


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    ends = eos_token_ids(metadata)
    if special_token(metadata, "eos") is None:
        texts = [metadata["tokenizer.ggml.tokens"][token_id] for token_id in ends]
        log.warning("the GGUF file has no tokenizer.ggml.eos_token_id; what ends answers", control_tokens=texts)
    return {"eos_token_id": ends, "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id")}


def _tensor_names(config: dict[str, Any]) -> dict[str, str]:
    """Hugging Face's name -> GGUF's, in file order."""
    family, names = FAMILIES[config["model_type"]], {"model.embed_tokens.weight": "token_embd.weight"}
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in layer_tensors(family).items():
            if theirs not in HEAD_NORMS or family.has_head_norms:
                names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
        for theirs in BIASED if family.has_biases else ():
            names[f"model.layers.{layer}.{LAYER_TENSORS[theirs]}.bias"] = f"blk.{layer}.{theirs}.bias"
    names["model.norm.weight"] = "output_norm.weight"
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    return names


def layer_tensors(family: Family) -> dict[str, str]:
    """GGUF's name -> Hugging Face's, in file order."""
    if family.scales == "gemma":
        return GEMMA_TENSORS
    return FUSED_TENSORS if family.is_fused else LAYER_TENSORS


def _check_names(found: set[str], wanted: set[str], model: str) -> None:
    if missing := sorted(wanted - found):
        raise ModelError(model, f"tensors are missing: {', '.join(missing[:5])}")
    if unknown := sorted(found - wanted):
        raise ModelError(model, f"tensors are not known to this architecture: {', '.join(unknown[:5])}")


def _write_tensors(
    file: BinaryIO,
    tensors: dict[str, ReaderTensor],
    config: dict[str, Any],
    model: str,
    advance: Callable[[float], None],
) -> None:
    """Writes a safetensors file: 8 bytes of header length, JSON header, data. The library's writer sorts tensors by
    name, which would separate those that are fused."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF counts dimensions from the innermost
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)  # so that the data starts on a cache line
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for name, tensor in tensors.items():
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            problem = f"tensor {tensor.name}: {tensor.tensor_type.name} cannot be de-quantised"
            raise ModelError(model, problem) from error
        if FAMILIES[config["model_type"]].scales == "gemma" and name.endswith("norm.weight"):
            values = values - 1  # which llama.cpp adds
        if FAMILIES[config["model_type"]].gguf == "pairs" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves_from_pairs(values, config["head_dim"])
        file.write(np.ascontiguousarray(values, dtype="<f4").data)
        advance(values.nbytes / (end or 1))


def _halves_from_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes llama.cpp's order of q and k rows: it rotates neighbours (2i, 2i + 1), we rotate (i, i + head_dim / 2)."""
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@contextmanager
def _progress_bar(file_name: str, visible: bool) -> Iterator[Callable[[float], None]]:
    with Progress(console=Console(stderr=True), disable=not visible) as progress:
        task = progress.add_task(f"converting {file_name}", total=1.0)
        yield lambda fraction: progress.advance(task, fraction)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")
