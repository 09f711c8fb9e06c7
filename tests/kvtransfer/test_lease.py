import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtransfer.lease import LeaseState, LeaseTable

NUM_BLOCKS = 6
WRITERS = st.integers(0, 2)


def test_a_lease_that_nobody_began_is_free_at_once() -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [1, 2], deadline_s=10.0)
    lease = table.fail("a")
    assert lease is not None
    assert lease.state is LeaseState.FREE
    assert table.begin("a", writer=1, now_s=0.0) is None
    assert len(table) == 0


def test_a_begun_lease_is_quarantined_until_its_own_writer_is_drained() -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [1, 2], deadline_s=10.0)
    table.begin("a", writer=1, now_s=0.0)
    assert table.drained("a", writer=1) is None
    lease = table.fail("a")
    assert lease is not None
    assert lease.state is LeaseState.QUARANTINE
    assert table.commit("a", writer=1) is None
    assert table.drained("a", writer=2) is None
    assert table.expired(now_s=1e9) == []
    assert len(table) == 1
    assert table.drained("a", writer=1) is lease
    assert len(table) == 0


def test_begin_after_the_deadline_is_refused_even_before_anybody_noticed() -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [1], deadline_s=10.0)
    assert table.begin("a", writer=1, now_s=10.0) is None


def test_a_block_is_never_leased_twice() -> None:
    table = LeaseTable(NUM_BLOCKS)
    table.reserve("a", [1, 2], deadline_s=10.0)
    with pytest.raises(AssertionError, match="block 2 is leased already"):
        table.reserve("b", [3, 2], deadline_s=10.0)
    assert table.check_integrity() == []
    table.reserve("b", [3], deadline_s=10.0)


class LeaseMachine(RuleBasedStateMachine):
    """Against an oracle that knows nothing of leases: what each block is, and which writers may touch it."""

    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(NUM_BLOCKS)
        self.now_s = 0.0
        self.count = 0
        self.state = ["free"] * NUM_BLOCKS
        self.transfer = [""] * NUM_BLOCKS
        self.writer: list[int | None] = [None] * NUM_BLOCKS  # who may write the block at this moment
        self.deadline_s: dict[str, float] = {}

    def blocks(self, transfer: str) -> list[int]:
        return [block for block in range(NUM_BLOCKS) if self.transfer[block] == transfer]

    def is_all(self, transfer: str, state: str, writer: int | None = None) -> bool:
        blocks = self.blocks(transfer)
        return bool(blocks) and all(self.state[b] == state and self.writer[b] in (writer, None) for b in blocks)

    def set_all(self, transfer: str, state: str, writer: int | None) -> None:
        for block in self.blocks(transfer):
            self.state[block], self.writer[block] = state, writer
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
        for block in blocks:
            self.state[block], self.transfer[block] = "reserved", name
        return name

    @rule(name=transfers, writer=WRITERS)
    def begin(self, name: str, writer: int) -> None:
        may = self.is_all(name, "reserved") and self.now_s < self.deadline_s[name]
        assert (self.table.begin(name, writer, self.now_s) is not None) == may
        if may:
            self.set_all(name, "receiving", writer)

    @rule(name=transfers, writer=WRITERS)
    def commit(self, name: str, writer: int) -> None:
        may = self.is_all(name, "receiving", writer)
        assert (self.table.commit(name, writer) is not None) == may
        if may:
            self.set_all(
                name, "free", None
            )  # for the table: the sequence that has the blocks now gives them back later

    @rule(name=transfers)
    def fail(self, name: str) -> None:
        self.check_failure(name, self.table.fail(name) is not None)

    def check_failure(self, name: str, failed: bool) -> None:
        if self.is_all(name, "reserved"):
            assert failed
            self.set_all(name, "free", None)
        elif self.blocks(name) and self.state[self.blocks(name)[0]] == "receiving":
            assert failed
            self.set_all(name, "quarantine", self.writer[self.blocks(name)[0]])
        else:
            assert not failed

    @rule(name=transfers, writer=WRITERS)
    def drained(self, name: str, writer: int) -> None:
        may = self.is_all(name, "quarantine", writer)
        assert (self.table.drained(name, writer) is not None) == may
        if may:
            self.set_all(name, "free", None)

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        running = {self.transfer[b] for b in range(NUM_BLOCKS) if self.state[b] in ("reserved", "receiving")}
        late = {name for name in running if self.deadline_s[name] <= self.now_s}
        assert {lease.transfer_id for lease in self.table.expired(self.now_s)} == late
        for name in late:
            self.check_failure(name, self.table.fail(name) is not None)

    @rule(name=consumes(transfers))
    def forget(self, name: str) -> None:
        """Keeps the bundle from holding only ended transfers."""

    @invariant()
    def every_block_is_what_the_oracle_says(self) -> None:
        states = ["free"] * NUM_BLOCKS
        for lease in self.table.leases():
            for block in lease.block_ids:
                assert states[block] == "free"
                states[block] = lease.state.value
        assert states == self.state
        assert all(states[b] in ("receiving", "quarantine") for b in range(NUM_BLOCKS) if self.writer[b] is not None)
        running = [b for b in range(NUM_BLOCKS) if states[b] in ("reserved", "receiving")]
        due_s = min((self.deadline_s[self.transfer[b]] for b in running), default=None)
        assert self.table.next_deadline_s() == due_s
        assert self.table.check_integrity() == []


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
