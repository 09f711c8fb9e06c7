"""The names of vLLM that we use, against the real one."""

import subprocess
from pathlib import Path

import pytest

from tests.test_packaging import ROOT
from tests.vllm.environment import LIMIT_S, variables

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

ASK = """
from engine.vllm.private_names import OLDER, missing
print(*(name.path for name in missing() if name.feature != OLDER), 'are missing')
"""


def test_this_version_of_vllm_lacks_no_name_that_a_feature_needs(vllm_python: Path) -> None:
    asked = subprocess.run([vllm_python, "-c", ASK], env=variables(), cwd=ROOT, capture_output=True, check=True)
    assert asked.stdout.decode().splitlines()[-1] == "are missing"
