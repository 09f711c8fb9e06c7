"""The names of vLLM that we use, and those of its requests' fields, against the real one, which need not compute."""

import json
import subprocess
from pathlib import Path

import pytest

from router.api.dialects.json_body import served_fields, unserved_fields
from router.api.openai.types import ChatBody, CompletionBody
from tests.test_packaging import ROOT
from tests.vllm.environment import LIMIT_S, variables

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

ASK = """
from engine.vllm.private_names import OLDER, missing
print(*(name.path for name in missing() if name.feature != OLDER), 'are missing')
"""
FIELDS = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
print(json.dumps([sorted(kind.model_fields) for kind in (ChatCompletionRequest, CompletionRequest)]))
"""


def told(python: Path, program: str) -> str:
    """The last line that it prints."""
    asked = subprocess.run([python, "-c", program], env=variables(), cwd=ROOT, capture_output=True, check=True)
    return asked.stdout.decode().splitlines()[-1]


def test_this_version_of_vllm_lacks_no_name_that_a_feature_needs(vllm_python: Path) -> None:
    assert told(vllm_python, ASK) == "are missing"


def test_every_field_of_vllms_requests_is_served_or_known(vllm_python: Path) -> None:
    for body, names in zip((ChatBody, CompletionBody), json.loads(told(vllm_python, FIELDS)), strict=True):
        assert set(names) - {*served_fields(body), *unserved_fields(body)} == set(), body
