"""The queue's order against brute force: what each tenant gets, by prompt tokens."""

from collections import defaultdict
from dataclasses import dataclass

from hypothesis import given, strategies as st

from runtime.fair_queue import MAX_IDLE_TENANTS, FairQueue


@dataclass(eq=False)
class Request:
    name: str
    tenant: str = "a"
    tokens: int = 10
    priority: int = 0


def drain(queue: FairQueue[Request]) -> list[Request]:
    taken = []
    while len(queue):
        first = next(queue.order())
        queue.take(first)
        taken.append(first)
    return taken


def names(requests: list[Request]) -> str:
    return "".join(request.name for request in requests)


def filled(*requests: Request) -> FairQueue[Request]:
    queue: FairQueue[Request] = FairQueue()
    for request in requests:
        queue.push(request)
    return queue


def test_who_has_paid_goes_before_those_of_its_priority_who_have_not() -> None:
    queue = filled(Request("x"), Request("u", priority=1), Request("r", "b", tokens=0))
    assert names(drain(queue)) == "urx"


def test_what_leaves_without_having_gone_costs_its_tenant_nothing() -> None:
    gone = [Request("x", "a", 1000) for _ in range(5)]
    queue = filled(*gone, Request("A", "a"), Request("A", "a"), Request("b", "b"), Request("b", "b"))
    for request in gone:
        queue.remove(request)
    assert names(drain(queue)) in ("AbAb", "AbbA", "bAbA", "bAAb")


def test_what_a_tenant_had_is_forgotten_when_nobody_waits() -> None:
    queue = filled(Request("A", "a", 10_000), Request("b", "b", 1))
    drain(queue)
    queue.push(Request("A", "a"))
    queue.push(Request("b", "b"))
    assert names(drain(queue)) == "Ab"


def test_tenants_that_come_once_leave_nothing_behind() -> None:
    queue = filled(Request("x", "patient", 10))
    for number in range(5000):
        passing = Request("y", f"tenant-{number}", 10)
        queue.push(passing)
        queue.take(passing)
    level = queue._levels[0]
    assert len(level._start) <= 1 + MAX_IDLE_TENANTS


tenants = st.sampled_from("abc")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), tenants, st.integers(1, 50), st.integers(0, 1)),
        st.tuples(st.just("take"), st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 100)),
    ),
    max_size=120,
)


@given(steps)
def test_no_priority_is_passed_over_and_each_tenants_requests_go_in_the_order_of_arrival(
    steps: list[tuple[object, ...]],
) -> None:
    queue: FairQueue[Request] = FairQueue()
    waiting: list[Request] = []  # in order of arrival
    for step in steps:
        if step[0] == "push":
            _, tenant, tokens, priority = step
            request = Request("", str(tenant), int(str(tokens)), int(str(priority)))
            waiting.append(request)
            queue.push(request)
        elif waiting:
            order = list(queue.order())
            assert sorted(map(id, order)) == sorted(map(id, waiting))
            first = order[0]
            assert first.priority == max(request.priority for request in waiting)
            for tenant in "abc":
                for priority in (0, 1):
                    mine = [r for r in order if (r.tenant, r.priority) == (tenant, priority)]
                    assert mine == [r for r in waiting if (r.tenant, r.priority) == (tenant, priority)]
            at = int(str(step[1]))
            if step[0] == "take":
                chosen = order[min(at, len(order) - 1)]
                queue.take(chosen)
            else:
                chosen = waiting[at % len(waiting)]
                queue.remove(chosen)
            waiting.remove(chosen)
        assert list(queue) == waiting


arrivals = st.lists(st.tuples(tenants, st.integers(1, 100)), min_size=3, max_size=80)


@given(arrivals, arrivals)
def test_tenants_that_wait_together_get_shares_that_differ_by_no_more_than_one_request_of_each(
    at_once: list[tuple[str, int]], one_by_one: list[tuple[str, int]]
) -> None:
    """Over every span of time in which both have something waiting, against a count by hand."""
    queue = filled(*[Request("", tenant, tokens) for tenant, tokens in at_once])
    later = [Request("", tenant, tokens) for tenant, tokens in one_by_one]
    largest = max(tokens for _, tokens in at_once + one_by_one)
    history: list[tuple[frozenset[str], str, int]] = []  # who waited; who went, with how much
    while len(queue):
        first = next(queue.order())
        history.append((frozenset(request.tenant for request in queue), first.tenant, first.tokens))
        queue.take(first)
        if later:
            queue.push(later.pop(0))
    for begin in range(len(history)):
        got: dict[str, int] = defaultdict(int)
        together = set("abc")
        for waited, tenant, tokens in history[begin:]:
            together &= waited
            got[tenant] += tokens
            for one in together:
                for other in together:
                    assert abs(got[one] - got[other]) <= 2 * largest


@given(arrivals)
def test_tenants_that_begin_together_differ_by_no_more_than_one_request(at_once: list[tuple[str, int]]) -> None:
    queue = filled(*[Request("", tenant, tokens) for tenant, tokens in at_once])
    largest = max(tokens for _, tokens in at_once)
    got: dict[str, int] = defaultdict(int)
    while len(queue):
        waiting = {request.tenant for request in queue}
        assert all(abs(got[one] - got[other]) <= largest for one in waiting for other in waiting)
        first = next(queue.order())
        queue.take(first)
        got[first.tenant] += first.tokens


@given(st.lists(st.integers(1, 1000), max_size=200), st.integers(1, 100))
def test_no_tenant_starves_however_much_another_one_sends(flood: list[int], tokens: int) -> None:
    """A request waits for no more of a flood than the flood's tenant is due."""
    queue = filled(*[Request("A", "a", size) for size in flood], Request("b", "b", tokens), Request("b", "b", tokens))
    order = drain(queue)
    second = [at for at, request in enumerate(order) if request.tenant == "b"][1]
    before = [request.tokens for request in order[:second] if request.tenant == "a"]
    assert sum(before[:-1]) <= tokens, "all but the last one began before the second request was due"


@given(arrivals)
def test_the_order_is_that_in_which_all_go_if_nothing_else_comes(at_once: list[tuple[str, int]]) -> None:
    queue = filled(*[Request(str(number), tenant, tokens) for number, (tenant, tokens) in enumerate(at_once)])
    assert list(queue.order()) == drain(queue)


def test_room_is_made_by_the_latest_of_the_tenant_that_holds_most_and_never_by_who_has_paid() -> None:
    queue = filled(Request("1", "a"), Request("2", "b"), Request("3", "a"), Request("p", "b", 0), Request("4", "b"))
    queue.push(Request("high", "c", priority=2))
    held = {"a": 2, "b": 4, "c": 1}

    def victims(priority: int, tenant: str) -> str:
        return names(list(queue.dispensable(priority, tenant, held)))

    assert victims(0, "new") == "4231"
    assert victims(0, "c") == "42", "a holds no more than c will"
    assert victims(0, "b") == victims(-1, "new") == ""
    assert victims(1, "b") == "4231", "for a higher priority whoever holds it"


def test_where_nobody_waits_nobody_makes_room() -> None:
    low, paid = Request("l", "a", priority=-1), Request("p", "c", 0, priority=3)
    queue = filled(low, paid)
    assert low in queue
    assert Request("other", "a") not in queue
    assert list(queue.dispensable(-1, "new", {"a": 3})) == [low]
    assert not list(queue.dispensable(-1, "new", {}))
    queue.remove(low)
    assert low not in queue
    assert not list(queue.dispensable(3, "new", {"c": 5}))
    queue.remove(paid)
    assert not list(queue.dispensable(9, "new", {"c": 5}))


def test_idle_tenants_are_remembered_and_when_they_are_too_many_the_half_furthest_ahead() -> None:
    """One tenant waits with small requests, and another one that has had very much already; the others come and go."""
    greedy = Request("", "greedy", 1000)
    queue = filled(*[Request("a", "a", 1) for _ in range(5)], greedy, Request("", "greedy", 1000))
    queue.take(greedy)
    had: dict[str, int] = {}

    def comes_and_goes() -> None:
        number = len(had)
        request = Request("", f"tenant-{number}", 10 + 37 * number % 101)
        had[request.tenant] = request.tokens
        queue.push(request)
        queue.take(request)

    def remembered() -> set[str]:
        """The idle tenants whose next request would go behind those of the first tenant."""
        found = set()
        for tenant in had:
            request = Request("!", tenant, 1)
            queue.push(request)
            if names(list(queue.order())).startswith("aaaaa"):
                found.add(tenant)
            queue.remove(request)
        return found

    for _ in range(MAX_IDLE_TENANTS):
        comes_and_goes()
    assert remembered() == set(had)
    comes_and_goes()
    assert remembered() == set(sorted(had, key=had.__getitem__)[-MAX_IDLE_TENANTS // 2 :])
