"""Limits that several routers keep together, against one bucket that sees everything."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings, strategies as st

from baton.service.local.nats_server import NatsServer
from baton_proto.routers.rates import decode_rates, encode_rates
from router.requests.rate_limits import Account, RateLimits
from router.requests.shared_limits import LimitSharing, LimitsOfAll
from router.siblings import Siblings
from runtime.nats.client import connect
from runtime.security.callers import Caller
from tests.router.requests.test_rate_limits import Clock, admitted

CALLER = Caller("a", requests_per_minute=600, tokens_per_minute=6000, key="key-1")
steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 500), st.floats(0, 5), st.sampled_from(("take", "lost", "restart"))),
    max_size=40,
)


class Router:
    def __init__(self, name: str, clock: Clock) -> None:
        self.limits = RateLimits(clock)
        self.shared = LimitsOfAll(self.limits, name)
        self.limits.changed = self.shared.note

    @property
    def account(self) -> Account:
        return self.limits.account(CALLER)

    def levels(self, now_s: float) -> list[float]:
        return [bucket.level(now_s) for bucket in self.account.buckets if bucket is not None]


def tell(routers: list[Router], teller: Router, *, full: bool = False, lost: bool = False) -> None:
    data = encode_rates(teller.shared.report(full=full))
    for router in routers:
        if router is not teller and not lost:
            router.shared.apply(decode_rates(data))


@settings(max_examples=200, deadline=None)
@given(steps)
def test_each_router_has_left_what_one_that_sees_all_has(steps: list[tuple[int, int, float, str]]) -> None:
    clock = Clock(1000.0)
    routers = [Router(f"router-{number}", clock) for number in range(3)]
    one = Account(CALLER, clock)
    for router in routers:
        assert router.account is not None
        tell(routers, router, full=True)
    for which, tokens, wait_s, event in steps:
        clock.now_s += wait_s
        router = routers[which]
        if event == "restart":
            for each in routers:
                tell(routers, each, full=True)
            router = routers[which] = Router(f"router-{which}", clock)
            for each in routers:
                tell(routers, each, full=True)
        router.account.spend(tokens)
        one.spend(tokens)
        tell(routers, router, lost=event == "lost")
    for router in routers:  # what was lost is made good
        tell(routers, router, full=True)
    levels = [bucket.level(clock.now_s) for bucket in one.buckets if bucket is not None]
    late = sum(tokens for _, tokens, _, event in steps if event == "lost")
    for router in routers:
        requests, left = router.levels(clock.now_s)
        assert requests == pytest.approx(levels[0])
        assert levels[1] - late - 1e-6 <= left <= levels[1] + 1e-6, "what is told late may have been made up for"


async def test_what_a_caller_has_taken_at_one_router_is_gone_at_the_others_and_where_one_starts(
    nats_server: NatsServer,
) -> None:
    names = ["router-1", "router-2", "router-3"]
    caller = Caller("a", requests_per_minute=2, key="key-1")
    async with AsyncExitStack() as closing, asyncio.timeout(60):
        limits = {}
        for name in names:
            nats = await connect(nats_server.url, name, timeout_s=60)
            closing.push_async_callback(nats.close)
            limits[name] = RateLimits()
            sharing = LimitSharing(nats, Siblings(nats, name, lambda: names), limits[name], name)
            if name == "router-3":
                assert not admitted(limits["router-1"].account(caller))
            await sharing.start()
            closing.push_async_callback(sharing.close)
            if name == "router-2":
                second = limits[name].account(caller)
                assert admitted(limits["router-1"].account(caller))
                assert admitted(limits["router-1"].account(caller))
                while second.buckets[0] is None or second.buckets[0].level(limits[name].clock()) > 1:
                    await asyncio.sleep(0.01)
        assert not admitted(limits["router-2"].account(caller))
        assert not admitted(limits["router-3"].account(caller))
