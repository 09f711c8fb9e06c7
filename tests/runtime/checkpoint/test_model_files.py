import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from runtime.checkpoint.model_cache import cache_folder, converted_folder
from runtime.checkpoint.model_files import resolve_model, weight_files
from runtime.errors import ConfigError, ModelError
from tests.tiny_model import write_tiny_model


def test_a_hugging_face_folder_is_used_as_it_is(tmp_path: Path) -> None:
    files = resolve_model(str(write_tiny_model(tmp_path / "my-model")))
    assert files.folder == tmp_path / "my-model"
    assert files.name == "my-model"
    assert files.eos_token_ids == {0, 2}
    assert files.max_position == 4096
    assert files.config.architecture == "llama"


def test_eos_ids_come_from_config_json_when_there_is_no_generation_config(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert resolve_model(str(tmp_path)).eos_token_ids == {2}


@pytest.mark.parametrize("token", ["<|im_start|>", {"content": "<|im_start|>"}], ids=["text", "object"])
def test_an_answer_also_ends_at_the_token_that_the_tokenizer_names(tmp_path: Path, token: object) -> None:
    path = write_tiny_model(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": token}))
    assert resolve_model(str(tmp_path)).eos_token_ids == {0, 1, 2}


def test_the_tokenizers_end_token_may_be_one_that_tokenizer_config_json_adds(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, vocab_size=520) / "tokenizer_config.json"
    added = {"eos_token": "<|turn|>", "added_tokens_decoder": {"512": {"content": "<|turn|>", "special": True}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    assert resolve_model(str(tmp_path)).eos_token_ids == {0, 2, 512}


def test_a_model_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gpt-5' is neither 'smollm2' nor an existing folder"):
        resolve_model("gpt-5")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"neither a folder nor a \.gguf file"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(ModelError, match=name):
        resolve_model(str(tmp_path))


def test_only_a_name_is_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.checkpoint.model_files.hub_folder", None)  # calling it would fail
    for path in ("./Qwen3-0.6B", "/models/Qwen3", "models/a.gguf", "a/b/c"):
        with pytest.raises(ConfigError, match="nor a name such as Qwen/"):
            resolve_model(path)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_quantized_folder_is_refused_with_the_formats_that_are_served(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"\({re.escape(name)}\) are not served: take .*safetensors, or a \.gguf"):
        resolve_model(str(tmp_path))


def test_a_folder_with_pickled_weights_says_which_formats_are_read(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors is missing; weights are read from safetensors or \.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("eos", ["2", [2, -1], [512], {"a": 1}])
def test_malformed_eos_ids_are_refused(tmp_path: Path, eos: object) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match="eos_token_id"):
        resolve_model(str(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model-1-of-2.safetensors")
    with pytest.raises(ModelError, match=r"model-2-of-2\.safetensors is missing"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="malformed"):
        weight_files(tmp_path)


def test_resolving_a_model_does_not_import_torch(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    code = "import sys, runtime.checkpoint.model_files as m; m.resolve_model(sys.argv[1]); print(sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    assert "'runtime.checkpoint.model_files'" in modules
    assert not any(f"'{name}'" in modules for name in ("torch", "transformers", "gguf"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_folder() == Path.home() / ".cache" / "baton"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/baton")
    monkeypatch.setenv("BATON_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_a_source_is_converted_once_for_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    source, calls = tmp_path / "m.gguf", []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        (folder / "copy").write_bytes(source.read_bytes())

    source.write_bytes(b"one")
    first = converted_folder(source, convert)
    os.utime(source, (0, 0))
    assert converted_folder(source, convert) == first
    source.write_bytes(b"two")
    second = converted_folder(source, convert)
    assert ((first / "copy").read_bytes(), (second / "copy").read_bytes()) == (b"one", b"two")
    assert len(calls) == 2


def test_a_conversion_that_fails_or_was_killed_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "m.gguf"
    source.write_bytes(b"one")

    def failing(source: Path, folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(ModelError, match="No space left"):
        converted_folder(source, failing)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]

    def good(source: Path, folder: Path) -> None:
        assert not list(folder.iterdir())

    expected = converted_folder(source, good)
    expected.rename(expected.with_name(expected.name + ".unfinished"))  # as a killed conversion leaves it
    (expected.with_name(expected.name + ".unfinished") / "half").write_text("half")
    assert converted_folder(source, good) == expected


def test_a_cache_that_others_may_write_or_have_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "m.gguf"
    source.write_bytes(b"one")

    def convert(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_text("ours")

    made = converted_folder(source, convert)
    for folder in (tmp_path / "cache", made.parent, made):
        folder.chmod(0o1777)
        with pytest.raises(ModelError, match=rf"the cache .*: {folder} lets others write it .*; BATON_CACHE may name"):
            converted_folder(source, convert)
        folder.chmod(0o755)
    (made / "model.safetensors").rename(tmp_path / "theirs")
    (made / "model.safetensors").symlink_to(tmp_path / "theirs")
    with pytest.raises(ModelError, match=r"model\.safetensors is a link, or belongs to another user: remove it"):
        converted_folder(source, convert)


RACER = """
import sys, time
from pathlib import Path
from runtime.checkpoint.model_cache import converted_folder

def convert(source, folder):
    with open(sys.argv[2], "a") as log:
        log.write("converted\\n")
    time.sleep(0.3)  # long enough for the other processes to arrive
    (folder / "done").write_text("done")

print((converted_folder(Path(sys.argv[1]), convert) / "done").read_text())
"""


def test_processes_that_ask_at_once_share_one_conversion(tmp_path: Path) -> None:
    source, log = tmp_path / "m.gguf", tmp_path / "log"
    source.write_bytes(b"one")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(source), str(log)],
            env=os.environ | {"BATON_CACHE": str(tmp_path / "cache")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert [racer.communicate(timeout=110)[0].strip() for racer in racers] == ["done"] * 4
    assert log.read_text() == "converted\n"
