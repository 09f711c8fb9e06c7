"""What a decode worker tells its router of a prompt that a prefill worker could not ship."""

import time
from typing import Any, cast

import pytest

from baton_proto.sampling import SamplingParams
from baton_proto.worker import Failure, PrefillTarget, Submit
from decode_worker.handoff import Handoffs
from engine.sequences.sequence import Sequence
from worker.requests.request import Phase, Request

SAMPLING = SamplingParams(max_tokens=4)
THEIRS = Failure("deadline", "the prompt was not shipped within 0.1 s", retryable=False)


@pytest.mark.parametrize(("left_s", "code", "blamed"), [(60.0, "prefill_failed", "p"), (0.0005, "deadline", "")])
def test_a_prefill_worker_is_blamed_while_there_is_time_for_another_one(left_s: float, code: str, blamed: str) -> None:
    """Its clock may ring a little before ours."""
    submit = Submit("r", bytes(8), 2, SAMPLING, 0.1, prefill=PrefillTarget("p", 1, "127.0.0.1:1"))
    deadline_s = time.monotonic() + left_s
    request = Request(cast(Any, None), submit, Sequence("r/1", [1, 2], 2, SAMPLING), deadline_s, Phase.PREFILLING)
    handoffs, told = object.__new__(Handoffs), list[Failure]()
    handoffs._fail = lambda _, failure: told.append(failure)
    handoffs._prefill_failed(request, THEIRS)
    assert [(failure.code, failure.retryable, failure.worker_id) for failure in told] == [
        (code, code == "prefill_failed", blamed)
    ]
