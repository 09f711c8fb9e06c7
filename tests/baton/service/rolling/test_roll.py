"""A roll-out that fails goes back, and again when that fails too."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.service.children import Children
from baton.service.launcher import Generation
from baton.service.rolling import roll
from baton.service.rolling.plan import Source
from baton_proto.rollout import Code
from runtime.config.serving import ServingConfig
from runtime.errors import BatonError, UnavailableError
from runtime.processes.process import ProcessFailedError

BEFORE, AFTER = ServingConfig(model="mock"), ServingConfig(model="other")


@pytest.mark.parametrize(("failures", "fails"), [(1, False), (roll.BACK_TRIES - 1, False), (roll.BACK_TRIES, True)])
async def test_the_way_back_is_tried_again_when_a_worker_dies_on_it(
    monkeypatch: pytest.MonkeyPatch, failures: int, fails: bool
) -> None:
    tried: list[ServingConfig] = []
    supervisor: Any = SimpleNamespace(config=BEFORE, generation=Generation(), children=Children())

    async def carry_out(self: object) -> None:
        tried.append(supervisor.config)
        if len(tried) <= 1 + failures:
            raise ProcessFailedError("decode-3", "has ended again")

    monkeypatch.setattr(roll._Roll, "carry_out", carry_out)
    with pytest.raises(BatonError, match="decode-3") as error:
        await roll.roll_out(supervisor, AFTER, Generation(2), Source(Code("1"), ""), cast(Any, lambda *a, **f: None))
    assert tried == [AFTER] + [BEFORE] * min(failures + 1, roll.BACK_TRIES)
    assert isinstance(error.value, UnavailableError) == fails
