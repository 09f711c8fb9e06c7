"""What tests of engines share. Triton kernels run in Triton's interpreter where there is no GPU; it has to be told
before they are imported."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.grammar.compiler import GrammarCompiler
from tests.forked import rank_process

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def files(tiny_model: Path) -> ModelFiles:
    """Of a tiny Llama, unless a module has others."""
    return resolve_model(str(tiny_model))


@pytest.fixture(scope="module")
def grammars(files: ModelFiles) -> GrammarCompiler:
    return GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)


@pytest.fixture(autouse=True, scope="session")
def forked_ranks() -> Iterator[None]:
    """Ranks 1 and above, which are not on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            names = SimpleNamespace(**vars(subprocess) | {"Popen": rank_process})
            patch.setattr("engine.ranks.ranks.subprocess", names)
        yield
