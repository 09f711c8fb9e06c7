from pathlib import Path

import pytest

from runtime.grammar.compiler import GrammarCompiler
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE


@pytest.fixture(scope="module")
def compiler(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, EOS_TOKEN_IDS)
