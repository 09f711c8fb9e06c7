from collections.abc import Iterable

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtransfer.decode_side.lease import Lease, LeaseState, LeaseTable

NUM_BLOCKS = 6
WRITERS = st.integers(0, 3)
ONE = (0,)  # the ranks that send, of a prefill worker of one rank
SENDERS = [ONE, (0, 1), (0, 2)]


def test_a_block_is_never_leased_twice() -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [1, 2], deadline_s=10.0)
    with pytest.raises(AssertionError, match="block 2 is leased already"):
        table.reserve("b", [3, 2], deadline_s=10.0)
    assert table.check_integrity() == []
    table.reserve("b", [3], deadline_s=10.0)


@pytest.mark.parametrize(
    ("transfer", "blocks", "problem"),
    [
        ("b", [3, 3], "a block is listed twice"),
        ("b", [-1], "block -1 is outside the slab"),
        ("b", [NUM_BLOCKS], "block 6 is outside the slab"),
        ("a", [3], None),
    ],
)
def test_what_no_owner_may_ask_for_is_refused_and_changes_nothing(
    transfer: str, blocks: list[int], problem: str | None
) -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [0, NUM_BLOCKS - 1], deadline_s=10.0)
    with pytest.raises(AssertionError, match=problem):
        table.reserve(transfer, blocks, deadline_s=10.0)
    assert [lease.block_ids for lease in table.leases()] == [(0, NUM_BLOCKS - 1)]
    assert table.check_integrity() == []


def test_a_lease_is_found_by_its_transfer_until_it_has_ended() -> None:
    table = LeaseTable(NUM_BLOCKS)
    first, second = (table.reserve(name, [block], deadline_s=10.0) for block, name in enumerate("ab"))
    assert (table.get("a"), table.get("b"), table.get("c")) == (first, second, None)
    table.fail("a")
    assert (table.get("a"), table.get("b")) == (None, second)


def test_a_rank_that_is_not_among_the_senders_cannot_begin() -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [1], deadline_s=10.0)
    with pytest.raises(AssertionError):
        table.begin("a", writer=1, rank=1, senders=(0, 2), now_s=0.0)


def begun() -> tuple[LeaseTable, Lease]:
    """A lease of senders 0, 1 and 2, of which the first two write."""
    table = LeaseTable(NUM_BLOCKS)
    lease = table.reserve("a", [1, 2], deadline_s=10.0)
    for rank in (0, 1):
        assert table.begin("a", 10 + rank, rank, (0, 1, 2), now_s=0.0) is lease
    assert table.check_integrity() == []
    return table, lease


@pytest.mark.parametrize(
    ("state", "senders", "unbegun", "writers"),
    [
        (LeaseState.RECEIVING, (0, 1, 2), {2}, {10: 0, 11: 0}),  # one rank on two connections
        (LeaseState.RECEIVING, (0, 1, 2), {2}, {10: 0, 11: 3}),  # a rank that has nothing to send
        (LeaseState.RECEIVING, (0, 1, 2), {3}, {10: 0, 11: 1}),
        (LeaseState.RECEIVING, (0, 1, 2), {1, 2}, {10: 0, 11: 1}),  # rank 1 has begun, and has not
        (LeaseState.RECEIVING, (0, 1, 2), set(), {}),  # all have committed
        (LeaseState.RESERVED, (0, 1, 2), {0, 1, 2}, {}),
        (LeaseState.QUARANTINE, (0, 1, 2), {2}, {}),
        (LeaseState.READY, (0, 1, 2), set(), {10: 0}),
        (LeaseState.FREE, (0, 1, 2), {2}, {10: 0}),
    ],
)
def test_a_lease_that_cannot_be_is_told(
    state: LeaseState, senders: tuple[int, ...], unbegun: set[int], writers: dict[int, int]
) -> None:
    table, lease = begun()
    lease.state, lease.senders, lease.unbegun, lease.writers = state, senders, unbegun, writers
    assert table.check_integrity() == [
        f"lease a is {state.value} with writers {writers}, of ranks {senders} not begun: {unbegun}"
    ]


@pytest.mark.parametrize(("unbegun", "writers"), [({2}, {}), (set(), {10: 0}), ({1}, {10: 2})])
def test_a_lease_with_a_rank_that_writes_or_has_not_begun_is_sound(unbegun: set[int], writers: dict[int, int]) -> None:
    table, lease = begun()
    lease.unbegun, lease.writers = unbegun, writers
    assert table.check_integrity() == []


def test_blocks_that_are_leased_in_one_account_only_are_told() -> None:
    table, lease = begun()
    lease.block_ids = (1, 3)
    assert table.check_integrity() == ["leased blocks and the leases' block lists disagree"]


class LeaseMachine(RuleBasedStateMachine):
    """Against an oracle that knows nothing of leases: what each block is, and which connections may touch it."""

    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(NUM_BLOCKS)
        self.now_s = 0.0
        self.count = 0
        self.state = ["free"] * NUM_BLOCKS
        self.transfer = [""] * NUM_BLOCKS
        self.writers: list[frozenset[int]] = [frozenset()] * NUM_BLOCKS  # who may write the block at this moment
        self.deadline_s: dict[str, float] = {}
        self.senders: dict[str, tuple[int, ...]] = {}  # of begun transfers
        self.begun: dict[str, set[int]] = {}  # ranks
        self.committed: dict[str, int] = {}  # how many ranks

    def blocks(self, transfer: str) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.transfer[block] == transfer]

    def is_all(self, transfer: str, *states: str) -> bool:
        blocks = self.blocks(transfer)
        return bool(blocks) and all(self.state[block] in states for block in blocks)

    def may_write(self, transfer: str) -> frozenset[int]:
        sets = {self.writers[block] for block in self.blocks(transfer)}
        assert len(sets) <= 1
        return next(iter(sets), frozenset())

    def set_all(self, transfer: str, state: str, writers: Iterable[int] = ()) -> None:
        for block in self.blocks(transfer):
            self.state[block], self.writers[block] = state, frozenset(writers)
            if state == "free":
                self.transfer[block] = ""

    @rule(target=transfers, wanted=st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=1), ttl_s=st.integers(1, 5))
    def reserve(self, wanted: set[int], ttl_s: int) -> object:
        blocks = [block for block in sorted(wanted) if self.state[block] == "free"]
        if not blocks:
            return multiple()
        self.count += 1
        name = f"t{self.count}"
        self.table.reserve(name, blocks, self.now_s + ttl_s)
        self.deadline_s[name] = self.now_s + ttl_s
        self.begun[name], self.committed[name] = set(), 0
        for block in blocks:
            self.state[block], self.transfer[block] = "reserved", name
        return name

    @rule(name=transfers, writer=WRITERS, senders=st.sampled_from(SENDERS), data=st.data())
    def begin(self, name: str, writer: int, senders: tuple[int, ...], data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(senders))
        may = (
            self.is_all(name, "reserved", "receiving")
            and self.now_s < self.deadline_s[name]
            and self.senders.get(name, senders) == senders
            and rank not in self.begun[name]
        )
        if may and writer in self.may_write(name):
            return  # a connection is of one rank, so it cannot begin as two
        assert (self.table.begin(name, writer, rank, senders, self.now_s) is not None) == may
        if may:
            self.senders[name] = senders
            self.begun[name].add(rank)
            self.set_all(name, "receiving", self.may_write(name) | {writer})

    @rule(name=transfers, writer=WRITERS)
    def commit(self, name: str, writer: int) -> None:
        may = self.is_all(name, "receiving") and writer in self.may_write(name)
        lease = self.table.commit(name, writer)
        assert (lease is not None) == may
        if lease is not None:
            self.committed[name] += 1
            done = self.committed[name] == len(self.senders[name])
            assert (lease.state is LeaseState.READY) == done
            # Free for the table: the sequence that has the blocks now gives them back later.
            self.set_all(name, "free" if done else "receiving", self.may_write(name) - {writer})

    @rule(name=transfers)
    def fail(self, name: str) -> None:
        lease = self.table.fail(name)
        assert (lease is not None) == self.is_all(name, "reserved", "receiving")
        if lease is not None:
            writers = self.may_write(name)
            assert (lease.state is LeaseState.FREE) == (not writers)
            self.set_all(name, "quarantine" if writers else "free", writers)

    @rule(name=transfers, writer=WRITERS)
    def drained(self, name: str, writer: int) -> None:
        may = self.is_all(name, "quarantine") and writer in self.may_write(name)
        lease = self.table.drained(name, writer)
        assert (lease is not None) == may
        if lease is not None:
            left = self.may_write(name) - {writer}
            assert (lease.state is LeaseState.FREE) == (not left)
            self.set_all(name, "quarantine" if left else "free", left)

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        running = {self.transfer[b] for b in range(NUM_BLOCKS) if self.state[b] in ("reserved", "receiving")}
        late = {name for name in running if self.deadline_s[name] <= self.now_s}
        assert {lease.transfer_id for lease in self.table.expired(self.now_s)} == late
        for name in late:
            self.fail(name)

    @rule(name=consumes(transfers))
    def forget(self, name: str) -> None:
        """Keeps the bundle from holding only ended transfers."""

    @invariant()
    def every_block_is_what_the_oracle_says(self) -> None:
        states, writers = ["free"] * NUM_BLOCKS, [frozenset[int]()] * NUM_BLOCKS
        for lease in self.table.leases():
            for block in lease.block_ids:
                assert states[block] == "free"
                states[block], writers[block] = lease.state.value, frozenset(lease.writers)
        assert (states, writers) == (self.state, self.writers)
        assert all(states[b] in ("receiving", "quarantine") for b in range(NUM_BLOCKS) if self.writers[b])
        for writer in range(4):
            may_write = {lease.transfer_id for lease in self.table.of_writer(writer)}
            assert may_write == {self.transfer[b] for b in range(NUM_BLOCKS) if writer in self.writers[b]}
        running = [b for b in range(NUM_BLOCKS) if states[b] in ("reserved", "receiving")]
        due_s = min((self.deadline_s[self.transfer[b]] for b in running), default=None)
        assert self.table.next_deadline_s() == due_s
        assert self.table.check_integrity() == []


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
