"""Models by name, with the real huggingface_hub and a server on 127.0.0.1 that speaks the Hub's protocol."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from runtime.checkpoint.hub import HubName, hub_name
from tests.hub_server import COMMITS, HubServer, hub_server
from tests.runtime.checkpoint.gguf.test_gguf import write_gguf
from tests.tiny_model import write_tiny_model

RESOLVE = """
import json, os, sys
from runtime.checkpoint.model_files import pinned
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import parse_config
from runtime.errors import BatonError
try:
    files = served_model(parse_config({"model": sys.argv[1]} | json.loads(os.environ.get("SECTIONS", "{}"))))
except BatonError as error:
    raise SystemExit(str(error))
print(files.folder, files.name, pinned(sys.argv[1], files))
"""
NAME = "acme/tiny-llama"
UNREACHABLE = "http://127.0.0.1:9"  # the port of `discard`


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    folder = write_tiny_model(tmp_path / "published")
    (folder / "original").mkdir()
    for unwanted in ("pytorch_model.bin", "original/consolidated.safetensors", "README.md"):
        (folder / unwanted).write_bytes(b"never fetched")
    with hub_server(NAME, folder) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def resolve(home: Path, url: str, name: str = NAME, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        env=clean | {"HF_HOME": str(home), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"} | environ,
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def resolved(home: Path, url: str, name: str = NAME, **environ: str) -> tuple[Path, str, str]:
    done = resolve(home, url, name, **environ)
    assert done.returncode == 0, done.stderr
    folder, served, pin = done.stdout.split()[-3:]
    return Path(folder), served, pin


def refused(home: Path, url: str, name: str = NAME, **environ: str) -> str:
    done = resolve(home, url, name, **environ)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main")),
        ("Qwen/Qwen3-0.6B@refs/pr/3", HubName("Qwen/Qwen3-0.6B", "refs/pr/3")),
        ("Qwen/Qwen3-0.6B@feature/x", HubName("Qwen/Qwen3-0.6B", "feature/x")),
        ("hf://Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main")),
        ("hf://Qwen/Qwen3-0.6B@v1", HubName("Qwen/Qwen3-0.6B", "v1")),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main")),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/refs/pr/3/", HubName("Qwen/Qwen3-0.6B", "refs/pr/3")),
        ("acme/tiny-GGUF/tiny-Q4_K_M.gguf", HubName("acme/tiny-GGUF", "main", "tiny-Q4_K_M.gguf")),
        ("hf://acme/tiny@refs/pr/3/q4/a.gguf", HubName("acme/tiny", "refs/pr/3", "q4/a.gguf")),
        ("https://hf.co/acme/tiny/blob/v1/q4/a.gguf", HubName("acme/tiny", "v1", "q4/a.gguf")),
        ("https://huggingface.co/acme/tiny/resolve/main/a.gguf?download=true", HubName("acme/tiny", "main", "a.gguf")),
        ("https://huggingface.co/acme/tiny/blob/main/config.json", None),
        ("https://huggingface.co/acme", None),
        ("https://example.com/acme/tiny", None),
        ("./acme/tiny/a.gguf", None),
        ("./Qwen3-0.6B", None),
        ("/models/Qwen3", None),
        ("~/Qwen3", None),
        ("models/a.gguf", None),
        ("a/b/c", None),
        ("gpt-5", None),
    ],
)
def test_a_name_of_the_hub_is_an_owner_and_a_model_or_its_address_or_a_file_of_it(
    text: str, name: HubName | None
) -> None:
    assert hub_name(text) == name


def test_a_model_is_downloaded_once_and_then_found_without_the_hub(hub: HubServer, home: Path) -> None:
    folder, name, pin = resolved(home, hub.url)
    assert name == NAME
    assert folder == home / "hub" / "models--acme--tiny-llama" / "snapshots" / COMMITS[-1]
    assert pin == f"{NAME}@{COMMITS[-1]}"
    got = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert got == small | {"model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()

    hub.requests.clear()
    assert resolved(home, hub.url) == (folder, NAME, pin)
    assert not hub.requests
    assert resolved(home, UNREACHABLE, HF_HUB_OFFLINE="1")[0] == folder
    assert resolved(home, UNREACHABLE, pin) == (folder, NAME, pin)


@pytest.mark.slow
def test_a_revision_is_a_folder_of_its_own(hub: HubServer, home: Path) -> None:
    resolved(home, hub.url)
    folder, name, _ = resolved(home, hub.url, f"{NAME}@{COMMITS[0]}")
    assert (folder.name, name) == (COMMITS[0], NAME)
    assert f"has no revision 'v7' on {hub.url}" in refused(home, hub.url, f"{NAME}@v7")


@pytest.mark.slow
def test_the_address_of_a_model_is_another_form_of_its_name(hub: HubServer, home: Path) -> None:
    folder, name, pin = resolved(home, hub.url, f"https://huggingface.co/{NAME}/tree/{COMMITS[0]}")
    assert (folder.name, name, pin) == (COMMITS[0], NAME, f"{NAME}@{COMMITS[0]}")
    assert resolved(home, UNREACHABLE, f"hf://{NAME}@{COMMITS[0]}")[0] == folder


@pytest.mark.slow
def test_a_gguf_file_of_a_repository_is_fetched_alone_and_converted(hub: HubServer, home: Path) -> None:
    for file in ("tiny-Q8_0.gguf", "q4/tiny-Q4_K_M.gguf"):
        (hub.folder / file).parent.mkdir(exist_ok=True)
        write_gguf(hub.folder / file)
    cache = {"BATON_CACHE": str(home.parent / "cache")}
    name = f"{NAME}/q4/tiny-Q4_K_M.gguf"
    folder, served, pin = resolved(home, hub.url, name, **cache)
    assert folder.parent == home.parent / "cache" / "models"
    assert folder.name.startswith("tiny-Q4_K_M-")
    assert (served, pin) == (name, f"{NAME}@{COMMITS[-1]}/q4/tiny-Q4_K_M.gguf")
    got = {path for path in (home / "hub").rglob("*") if path.is_symlink()}
    assert [path.name for path in got] == ["tiny-Q4_K_M.gguf"]
    assert resolved(home, UNREACHABLE, pin, **cache) == (folder, name, pin)
    words = refused(home, hub.url, f"{NAME}/tiny-Q2_K.gguf", **cache)
    assert f"{NAME}: has no file tiny-Q2_K.gguf at main: name one of its .gguf files" in words


def test_a_cache_that_another_program_has_filled_is_used(tmp_path: Path, home: Path) -> None:
    """As huggingface_hub lays it out: a ref, and a snapshot of links to blobs."""
    repo, published = home / "hub" / "models--acme--tiny-llama", write_tiny_model(tmp_path / "published")
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMITS[0])
    (repo / "blobs").mkdir()
    snapshot = repo / "snapshots" / COMMITS[0]
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(published.iterdir())):
        path.rename(repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert resolved(home, UNREACHABLE)[:2] == (snapshot, NAME)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tokenizer.json", "model-2-of-2.safetensors", "generation_config.json"])
def test_what_is_missing_in_the_cache_is_fetched(hub: HubServer, home: Path, file: str) -> None:
    tensors = load_file(hub.folder / "model.safetensors")
    (hub.folder / "model.safetensors").unlink()
    halves = {name: f"model-{1 + (number % 2)}-of-2.safetensors" for number, name in enumerate(tensors)}
    for shard in set(halves.values()):
        save_file({name: tensors[name] for name in tensors if halves[name] == shard}, hub.folder / shard)
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": halves}))
    folder, _, _ = resolved(home, hub.url)
    (folder / file).resolve().unlink()
    (folder / file).unlink()
    hub.requests.clear()
    assert resolved(home, hub.url)[0] == folder
    fetched = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert [request.split()[1].rpartition("/")[2] for request in fetched] == [file]


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: HubServer, home: Path) -> None:
    write_tiny_model(hub.folder, intermediate_size=4096)  # more than a chunk of huggingface_hub, 10 MiB
    hub.break_off["model.safetensors"] = 11 << 20
    folder, _, _ = resolved(home, hub.url)
    assert hub.downloads("model.safetensors") == ["", f"bytes={10 << 20}-"]
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_weights_that_do_not_have_their_checksum_are_refused_and_fetched_anew(hub: HubServer, home: Path) -> None:
    hub.spoiled = {"model.safetensors"}
    assert "model.safetensors came with other content than its checksum says" in refused(home, hub.url)
    hub.spoiled = set()
    folder, _, _ = resolved(home, hub.url)
    assert (folder / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()


def test_a_model_that_would_be_refused_costs_no_download_of_its_weights(hub: HubServer, home: Path) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "architectures ['GPT2LMHeadModel'] are not supported" in refused(home, hub.url)
    assert not hub.downloads("model.safetensors")


def test_where_nobody_computes_no_weights_are_fetched(hub: HubServer, home: Path) -> None:
    """Also none of a form that we cannot read."""
    (hub.folder / "model.safetensors").unlink()
    server = {"name": "gpu", "address": "http://gpu:8000", "events": "tcp://gpu:5557", "replay": "tcp://gpu:5558"}
    sections = {"external_workers": [server], "workers": {"prefill": 0, "decode": 0}}
    folder, _, _ = resolved(home, hub.url, SECTIONS=json.dumps(sections))
    got = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert got == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_a_model_with_pickled_weights_says_which_formats_are_read(hub: HubServer, home: Path) -> None:
    (hub.folder / "model.safetensors").unlink()
    assert "model.safetensors is missing; weights are read from safetensors" in refused(home, hub.url)
    assert not hub.downloads("pytorch_model.bin")


@pytest.mark.slow
def test_a_gated_model_says_where_its_terms_are_and_how_to_log_in(hub: HubServer, home: Path) -> None:
    hub.token, hub.gated = "hf_right", True
    for token in ({}, {"HF_TOKEN": "hf_wrong"}):
        words = refused(home, hub.url, **token)
        assert (
            f"{NAME}: is gated: accept its terms at {hub.url}/{NAME}, and log in (`hf auth login`, or HF_TOKEN)"
            in words
        )
    assert resolved(home, hub.url, HF_TOKEN="hf_right")[1] == NAME


@pytest.mark.slow
def test_a_name_that_nobody_knows_says_both_ways_out(hub: HubServer, home: Path) -> None:
    words = refused(home, hub.url, "acme/tiny-lama")
    assert f"acme/tiny-lama: is no folder here, and {hub.url} has no model of that name" in words
    assert "give an existing folder or a name from there; if the model is private, log in" in words
    hub.token = "hf_right"
    assert "has no model of that name" in refused(home, hub.url)  # the Hub does not tell private ones from others


@pytest.mark.slow
def test_without_a_network_or_offline_the_ways_out_are_named(hub: HubServer, home: Path) -> None:
    words = refused(home, UNREACHABLE)
    assert (
        f"{UNREACHABLE} cannot be reached: check the network, name a mirror in HF_ENDPOINT, or give a folder" in words
    )
    assert str(home) in words
    words = refused(home, hub.url, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids to download it: unset that, or give a folder" in words
    assert not hub.requests


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, home: Path) -> None:
    home.write_text("a file")
    assert f"Not a directory: '{home}" in refused(home, hub.url)


def test_a_local_folder_goes_before_the_hub(hub: HubServer, home: Path) -> None:
    write_tiny_model(home.parent / NAME)
    folder, name, pin = resolved(home, hub.url)
    assert (folder, name, pin) == (home.parent / NAME, "tiny-llama", NAME)
    assert not hub.requests
