"""What a request hears of a grammar that its worker cannot compile."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton_proto.grammar import Grammar
from runtime.errors import InvalidRequestError, UnavailableError
from worker.runtime import WorkerRuntime


@pytest.mark.parametrize(
    ("trouble", "heard"),
    [
        (MemoryError(), UnavailableError),
        (RuntimeError("a fault of ours"), UnavailableError),
        (InvalidRequestError("grammar", "is none"), InvalidRequestError),
    ],
)
async def test_whatever_goes_wrong_with_a_grammar_is_an_error_that_ends_its_request(
    trouble: Exception, heard: type[Exception]
) -> None:
    class Failing:
        async def matcher_soon(self, grammar: Grammar) -> None:
            raise trouble

    runtime: Any = SimpleNamespace(assembly=SimpleNamespace(grammars=Failing()), worker_id="decode-1")
    with pytest.raises(heard) as caught:
        await WorkerRuntime.matcher(runtime, Grammar("regex", "a"))
    assert trouble in (caught.value, caught.value.__cause__)
