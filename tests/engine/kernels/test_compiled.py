"""Kernels compile for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
EXPECTED = {"_decode", "_prefill", "_rotate_store", "_grouped_linear", "_fp8_linear", "_small_linear", "_rms_norm"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="every other test here compiles for this GPU")
def test_what_the_interpreter_runs_compiles_for_a_gpu() -> None:
    plugin = ["-p", "tests.engine.kernels.compile_for_hopper", "-p", "no:cacheprovider", "-n", "0", "--tb=no", "-q"]
    command = [sys.executable, "-m", "pytest", *plugin, "-m", "", str(HERE), f"--ignore={__file__}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False).stdout
    assert "refused:" not in told, told[told.index("refused:") :]
    compiled = next((line for line in told.splitlines() if line.startswith("compiled: ")), told)
    assert set(compiled.removeprefix("compiled: ").split(", ")) >= EXPECTED
