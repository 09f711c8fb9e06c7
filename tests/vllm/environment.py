"""The environment that has vLLM: `make vllm-env` makes it, BATON_VLLM_PYTHON names another one's interpreter."""

import os
from pathlib import Path

import pytest

from runtime.checkpoint.model_files import resolve_model
from tests.test_packaging import ROOT

VARIABLE = "BATON_VLLM_PYTHON"
START_S = 900.0  # an engine takes a minute to start, and longer where several share two cores with others
PATIENCE_S = 300.0  # for anything else: how fast a machine is decides nothing
LIMIT_S = 3600.0  # of a test


def vllm_python() -> Path | None:
    """The interpreter; None: there is no such environment."""
    path = Path(os.environ.get(VARIABLE, ROOT / ".venv-vllm" / "bin" / "python"))
    return path if path.is_file() else None


def needed_python() -> Path:
    """Skips the test where there is no such environment."""
    path = vllm_python()
    if path is None:
        pytest.skip(f"no environment with vLLM: `make vllm-env`, or name its interpreter in {VARIABLE}")
    return path


def smollm2() -> Path:
    """A folder in Hugging Face form, which vLLM can read."""
    return resolve_model("smollm2").folder


def variables() -> dict[str, str]:
    """Of every process with vLLM on a CPU: a small cache, one thread, no network. By default each server would bind
    threads to all cores, which then wait for each other."""
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")]),
    }
    return {**os.environ, **ours}
