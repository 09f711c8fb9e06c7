"""What the tests of the router share."""

from pathlib import Path

import pytest

from router.text.tokenizer import Tokenizer
from tests.tiny_model import VOCAB_SIZE


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model, VOCAB_SIZE)
