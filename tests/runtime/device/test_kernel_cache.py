"""Compiled kernels are kept in our own cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.device.kernel_cache import VARIABLE, keep_kernels
from worker.engines.own import build_engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ours, in a folder of the test's; nobody has named Triton's."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")  # so that it is as it was, afterwards
    return tmp_path / "cache"


def test_an_engine_that_may_use_triton_keeps_its_kernels_for_its_child_processes_too(
    tiny_model: Path, cache: Path
) -> None:
    config = with_overrides(
        ServingConfig(model=str(tiny_model)), {"engine": {"device": "cpu", "kv_memory": "16MiB"}}, "test"
    )
    build_engine(config).close()
    code = f"import os; print(os.environ[{VARIABLE!r}])"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.strip() == str(cache / "kernels")
    assert (cache / "kernels").is_dir()


def test_triton_takes_the_folder(cache: Path) -> None:
    pytest.importorskip("triton.knobs")
    keep_kernels()
    code = "from triton import knobs; print(knobs.cache.dir)"
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout.strip() == str(cache / "kernels")


def test_a_folder_that_somebody_has_named_stays(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv(VARIABLE, "/elsewhere")
    keep_kernels()
    assert os.environ[VARIABLE] == "/elsewhere"
    assert not cache.exists()


def test_kernels_are_not_taken_from_folders_that_others_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o1777)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "theirs"))
    keep_kernels()
    assert os.environ[VARIABLE] == str(cache / "kernels")
    (cache / "kernels").chmod(0o777)
    monkeypatch.setenv(VARIABLE, "")
    keep_kernels()
    assert os.environ[VARIABLE] == ""


def test_where_nothing_can_be_written_triton_keeps_its_own_folder(cache: Path) -> None:
    cache.write_text("a file, no folder")
    keep_kernels()
    assert os.environ[VARIABLE] == ""


def test_a_user_without_a_home_keeps_tritons_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("runtime.device.kernel_cache.cache_folder", homeless)
    keep_kernels()
    assert os.environ[VARIABLE] == ""
