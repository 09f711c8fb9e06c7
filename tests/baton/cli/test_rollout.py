"""What `baton rollout` says of a roll-out that it follows."""

from typing import cast

import pytest

from baton.cli import rollout
from baton_proto.rollout import News, ServiceView
from runtime.nats.client import NatsClient


@pytest.mark.parametrize(
    ("news", "problem"), [([], rollout.STARTED_ANEW), ([News("it has ended", "rolled_out", {})], "")]
)
async def test_a_service_that_knows_of_no_roll_out_was_started_anew_meanwhile(
    monkeypatch: pytest.MonkeyPatch, news: list[News], problem: str
) -> None:
    async def ask(nats: NatsClient, timeout_s: float, seen: int = 0) -> ServiceView:
        return ServiceView({}, {}, "1", news[seen:])

    monkeypatch.setattr(rollout, "ask_service", ask)
    assert await rollout._followed(cast(NatsClient, None), as_json=True) == problem
