"""The radix tree against a brute-force oracle that remembers each block of each worker in a dict."""

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from baton_proto.kv_events import DEVICE, DISK, HASH_BYTES, HOST, Cleared, Moved, Removed, Stored
from router.index.edge_table import MAX_EXTENDED_BYTES
from router.index.holders import Held
from router.index.radix_tree import RadixTree, UnknownBlockError
from runtime.blocks.block_hash import sequence_hashes
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import ProtocolError

A: WorkerKey = ("a", 1)
B: WorkerKey = ("b", 1)
C: WorkerKey = ("c", 7)


def blocks(*values: int) -> NDArray[np.uint64]:
    """Block hashes by small numbers; the values mean nothing to the tree."""
    return np.array(values, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def chain(*values: int) -> list[int]:
    """Sequence hashes of a path from the start."""
    return [int(hashed) for hashed in sequence_hashes(blocks(*values))]


def packed(hashes: list[int]) -> bytes:
    return np.array(hashes, dtype="<u8").tobytes()


def store(tree: RadixTree, worker: WorkerKey, path: list[int], known: int = 0, home: int = DEVICE) -> None:
    """Stores path[known:] behind path[:known]."""
    sequences = chain(*path)
    parent = sequences[known - 1] if known else None
    tree.apply_stored(worker, parent, blocks(*path[known:]).tobytes(), packed(sequences[known:]), home)


def move(tree: RadixTree, worker: WorkerKey, path: list[int], depths: list[int], home: int) -> None:
    """Moves the blocks of a path that end at these depths, in this order."""
    tree.apply_moved(worker, packed([chain(*path)[depth - 1] for depth in depths]), home)


def lower(tree: RadixTree, *path: int) -> dict[WorkerKey, list[int]]:
    """Blocks in host memory and on disk."""
    workers = tuple(tree.workers)
    return dict(zip(workers, tree.find(blocks(*path)).lower(workers).T.tolist(), strict=True))


def remove(tree: RadixTree, worker: WorkerKey, path: list[int], kept: int) -> None:
    """Removes path[kept:], leaves first."""
    tree.apply_removed(worker, packed(chain(*path)[kept:][::-1]))


def found(tree: RadixTree, *path: int) -> dict[WorkerKey, int]:
    return tree.find(blocks(*path)).as_dict()


def check_structure(tree: RadixTree) -> None:
    """All invariants of the data structure itself."""
    stack = [tree._edges.root]
    own = ~tree._holders.nearer
    edges = num_blocks = 0
    while stack:
        edge = stack.pop()
        assert edge.children is None or edge.children, "an empty dict of children is None"
        for first, child in (edge.children or {}).items():
            stack.append(child)
            edges += 1
            num_blocks += len(child.blocks) // HASH_BYTES
            assert child.parent is edge
            assert first == child.blocks[:HASH_BYTES]
            assert len(child.blocks) == len(child.sequences) > 0
            assert tree._edges._edges[child.number] is child
            hashes = np.frombuffer(child.sequences, dtype="<u8")
            assert all(tree._edges._index.get(key) == child.number for key in hashes.tolist())
            assert child.full & own > 0, "somebody covers the last block"
            for worker in tree.workers:
                as_near = [child.covered(bit) for bit in tree._holders.bits(worker)]
                assert as_near == sorted(as_near), "what lies on the device does not lie further away"
            assert child.full & ~edge.full == 0, "whoever covers a child covers its parent"
            for bit, covered in (child.partial or {}).items():
                assert 0 < covered < len(child.blocks)
                assert covered % HASH_BYTES == 0
                assert edge.full >> bit & 1
                assert not child.full >> bit & 1
            assert child.partial is None or child.partial
            if edge is not tree._edges.root and len(edge.children or {}) == 1:
                joined = len(edge.blocks) + len(child.blocks)
                assert child.full != edge.full or joined > MAX_EXTENDED_BYTES, "a run broken for nothing"
    assert edges == tree.num_edges
    assert num_blocks == tree.num_blocks


class TreeAgainstOracle(RuleBasedStateMachine):
    """Few workers and few block values: paths share prefixes and part ways all the time."""

    workers = st.sampled_from([A, B, C, ("a", 2)])
    homes = st.integers(DEVICE, DISK)
    paths = st.lists(st.integers(1, 3), min_size=1, max_size=10)

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.held: dict[WorkerKey, dict[tuple[int, ...], int]] = {}  # path -> its sequence hash
        self.home: dict[tuple[WorkerKey, tuple[int, ...]], int] = {}  # of what is held

    def has(self, worker: WorkerKey, path: tuple[int, ...]) -> bool:
        return path in self.held.get(worker, {})

    def near(self, worker: WorkerKey, path: tuple[int, ...], home: int) -> bool:
        """Whether a block lies in `home` or nearer; the start of all paths does."""
        return not path or (self.has(worker, path) and self.home[worker, path] <= home)

    @rule(worker=workers, path=paths, known=st.integers(0, 10), home=homes)
    def stored(self, worker: WorkerKey, path: list[int], known: int, home: int) -> None:
        known = min(known, len(path) - 1)
        if not self.near(worker, tuple(path[:known]), home):
            with pytest.raises(UnknownBlockError):
                store(self.tree, worker, path, known, home)
            return
        store(self.tree, worker, path, known, home)
        for depth, sequence in enumerate(chain(*path), start=1):
            block = tuple(path[:depth])
            before = self.home[worker, block] if self.has(worker, block) else home
            self.held.setdefault(worker, {})[block] = sequence
            self.home[worker, block] = min(before, home)

    @rule(worker=workers, path=paths, home=homes, data=st.data())
    def moved(self, worker: WorkerKey, path: list[int], home: int, data: st.DataObject) -> None:
        """Blocks of a path in any order, or in the order of those that come or go."""
        every = range(1, len(path) + 1)
        depths = data.draw(
            st.one_of(
                st.lists(st.integers(1, len(path)), min_size=1, max_size=5),
                st.integers(1, len(path)).map(lambda first: list(every[first - 1 :])),
                st.integers(1, len(path)).map(lambda first: list(every[first - 1 :][::-1])),
            )
        )
        unknown = 0
        for depth in depths:
            block = tuple(path[:depth])
            if not self.has(worker, block) or not self.near(worker, block[:-1], home):
                unknown += 1
            elif home <= self.home[worker, block]:
                self.home[worker, block] = home
            else:
                for behind in self.held[worker]:
                    if behind[:depth] == block:
                        self.home[worker, behind] = max(self.home[worker, behind], home)
        if unknown:
            with pytest.raises(UnknownBlockError) as raised:
                move(self.tree, worker, path, depths, home)
            assert raised.value.count == unknown
        else:
            move(self.tree, worker, path, depths, home)

    @rule(worker=workers, path=paths, data=st.data())
    def removed(self, worker: WorkerKey, path: list[int], data: st.DataObject) -> None:
        """Blocks of a path in any order, held or not."""
        sequences = chain(*path)
        depths = data.draw(st.lists(st.integers(1, len(path)), min_size=1, max_size=5))
        unknown = 0
        for depth in depths:
            gone = tuple(path[:depth])
            if self.has(worker, gone):
                held = self.held[worker]
                self.held[worker] = {p: s for p, s in held.items() if p[:depth] != gone}
            else:
                unknown += 1
        event = packed([sequences[depth - 1] for depth in depths])
        if unknown:
            with pytest.raises(UnknownBlockError) as raised:
                self.tree.apply_removed(worker, event)
            assert raised.value.count == unknown
        else:
            self.tree.apply_removed(worker, event)

    @rule(worker=workers, path=paths, data=st.data())
    def evicted_leaf_first(self, worker: WorkerKey, path: list[int], data: st.DataObject) -> None:
        if not self.has(worker, tuple(path)):
            return
        kept = data.draw(st.integers(0, len(path) - 1))
        self.held[worker] = {p: s for p, s in self.held[worker].items() if p[: kept + 1] != tuple(path[: kept + 1])}
        remove(self.tree, worker, path, kept)

    @rule(worker=workers)
    def cleared(self, worker: WorkerKey) -> None:
        self.tree.clear(worker)
        self.held.pop(worker, None)

    @rule(worker=workers)
    def worker_removed(self, worker: WorkerKey) -> None:
        self.tree.remove_worker(worker)
        self.held.pop(worker, None)
        assert worker not in self.tree.workers

    @rule(path=paths)
    def finds(self, path: list[int]) -> None:
        expected = {}
        for worker in self.held:
            depth = 0
            while depth < len(path) and self.has(worker, tuple(path[: depth + 1])):
                depth += 1
            if depth:
                expected[worker] = depth
        match = self.tree.find(blocks(*path))
        assert match.as_dict() == expected
        asked = (C, ("nobody", 1), ("a", 2), A, B)
        assert match.column(asked).tolist() == [expected.get(worker, 0) for worker in asked]
        assert all(type(depth) is int for depth in match.values())
        homes = {w: [self.home[w, tuple(path[: i + 1])] for i in range(depth)] for w, depth in expected.items()}
        if match.lower(asked).size:
            assert match.lower(asked).T.tolist() == [
                [homes.get(w, []).count(HOST), homes.get(w, []).count(DISK)] for w in asked
            ]
        else:
            assert all(home == DEVICE for of_path in homes.values() for home in of_path)

    @invariant()
    def dumps_what_is_held(self) -> None:
        for worker in [A, B, C, ("a", 2)]:
            expected = self.held.get(worker, {})
            dumped: dict[int, int | None] = {}
            homes: dict[int, int] = {}
            for run in self.tree.dump(worker):
                sequences = np.frombuffer(run.sequence_hashes, dtype="<u8").tolist()
                assert run.parent is None or run.parent in dumped, "parents come first"
                hashes = sequence_hashes(np.frombuffer(run.block_hashes, dtype="<u8"), run.parent).tolist()
                assert hashes == sequences
                for parent, sequence in zip([run.parent, *sequences], sequences, strict=False):
                    assert sequence not in dumped
                    dumped[sequence] = parent
                    homes[sequence] = run.home
            assert homes == {sequence: self.home[worker, path] for path, sequence in expected.items()}
            at = list(homes.values())
            assert self.tree.held(worker) == Held(len(at), at.count(HOST), at.count(DISK))
            assert set(dumped) == set(expected.values())
            assert self.tree.num_blocks_of(worker) == len(expected)

    @invariant()
    def structure_holds(self) -> None:
        check_structure(self.tree)
        assert self.tree.num_blocks == len({s for held in self.held.values() for s in held.values()})


TestTreeAgainstOracle = TreeAgainstOracle.TestCase
TestTreeAgainstOracle.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_decoding_extends_an_edge_in_place() -> None:
    tree = RadixTree()
    store(tree, A, [1])
    for length in range(2, 50):
        store(tree, A, list(range(1, length + 1)), known=length - 1)
    assert tree.num_edges == 1
    assert found(tree, *range(1, 60)) == {A: 49}


def test_a_very_long_sequence_becomes_several_edges_and_goes_away_again() -> None:
    tree = RadixTree()
    hashes = blocks(*range(1, 10_001))
    sequences = sequence_hashes(hashes)
    for start in range(0, 10_000, 100):
        parent = int(sequences[start - 1]) if start else None
        tree.apply_stored(A, parent, hashes[start : start + 100].tobytes(), sequences[start : start + 100].tobytes())
    assert tree.num_edges == 3
    assert tree.find(hashes).as_dict() == {A: 10_000}
    tree.apply_removed(A, sequences[100:][::-1].tobytes())
    assert tree.find(hashes).as_dict() == {A: 100}
    assert tree.num_edges == 1
    check_structure(tree)


def test_hundreds_of_workers_and_long_runs() -> None:
    """More workers than a machine word has bits, more blocks than the smallest block index has room for."""
    tree = RadixTree()
    path = np.arange(1, 2001)
    hashes, sequences = blocks(*path), packed(chain(*path))
    for number in range(300):
        length = 8 * (1000 + number)
        tree.apply_stored((f"w{number}", 1), None, hashes.tobytes()[:length], sequences[:length])
    match = tree.find(hashes)
    assert match.as_dict() == {(f"w{number}", 1): 1000 + number for number in range(300)}
    check_structure(tree)
    for number in range(299, -1, -1):
        tree.remove_worker((f"w{number}", 1))
        assert tree.num_blocks == (999 + number if number else 0)
    check_structure(tree)


def test_events_change_the_tree_as_their_methods_do() -> None:
    tree = RadixTree()
    one, two = chain(1, 2)
    tree.apply(A, Stored(None, blocks(1).tobytes(), packed([one])))
    tree.apply(A, Stored(one, blocks(2).tobytes(), packed([two])))
    assert found(tree, 1, 2) == {A: 2}
    tree.apply(A, Removed(packed([two])))
    assert found(tree, 1, 2) == {A: 1}
    tree.apply(B, Stored(None, blocks(1).tobytes(), packed([one])))
    tree.apply(A, Moved(packed([one]), HOST))
    assert lower(tree, 1, 2) == {A: [1, 0], B: [0, 0]}
    tree.apply(A, Cleared())
    assert found(tree, 1, 2) == {B: 1}


def test_errors_name_the_worker_and_what_is_wrong() -> None:
    """A refused event changes nothing."""
    tree = RadixTree()
    store(tree, ("first", 1), [1, 2, 3])
    one, _two, three = chain(1, 2, 3)
    worker = ("late", 3)
    uneven = "worker late: a stored run needs as many sequence as block hashes"
    stored: list[tuple[int | None, bytes, bytes, str]] = [
        (None, b"", b"", uneven),
        (None, blocks(1, 2).tobytes(), packed([one]), uneven),
        (None, b"123456789", b"123456789", uneven),
        (None, blocks(1, 2).tobytes(), packed([one, 77]), "worker late: a stored run names known blocks differently"),
        (None, blocks(8).tobytes(), packed([three]), "worker late: a stored run has sequence hashes that name other"),
        (None, blocks(8, 9).tobytes(), packed([55, 55]), "sequence hashes that name other"),
        (None, blocks(8).tobytes(), packed([0]), "sequence hashes that name other"),
        (three, blocks(4).tobytes(), packed([99]), r"worker late: stored behind: 1 block\(s\) that it does not hold"),
    ]
    for parent, block_run, sequence_run, message in stored:
        with pytest.raises(ProtocolError, match=message):
            tree.apply_stored(worker, parent, block_run, sequence_run)
    with pytest.raises(ProtocolError, match="worker late: removed hashes are not a whole number of u64"):
        tree.apply_removed(worker, b"123456789")
    message = r"worker late: removed: 2 block\(s\) that it does not hold"
    with pytest.raises(UnknownBlockError, match=message) as raised:
        tree.apply_removed(worker, packed([one, three]))
    assert (raised.value.peer, raised.value.count) == ("worker late", 2)
    store(tree, worker, [1])
    with pytest.raises(UnknownBlockError, match=message):
        tree.apply_removed(worker, packed([three, 5]))
    with pytest.raises(UnknownBlockError) as raised:
        store(tree, worker, [1, 2, 3], known=2)
    assert raised.value.count == 1
    with pytest.raises(ProtocolError, match="worker late: moved hashes are not a whole number of u64"):
        tree.apply_moved(worker, b"123", HOST)
    with pytest.raises(UnknownBlockError, match=r"worker late: moved: 1 block\(s\) that it does not hold"):
        tree.apply_moved(worker, packed([three]), HOST)
    tree.apply_removed(("nobody", 1), b"")
    tree.apply_moved(("nobody", 1), b"", HOST)
    assert found(tree, 1, 2, 3, 8) == {("first", 1): 3, worker: 1}
    check_structure(tree)


def test_edges_tell_their_owners_and_are_found_by_any_of_their_blocks() -> None:
    tree = RadixTree()
    assert tree.children() == []
    store(tree, A, [1, 2, 3, 4])
    store(tree, B, [1, 2, 3])
    store(tree, C, [1, 2, 9])
    (trunk,) = tree.children()
    assert tree.owners(trunk) == {A: Held(2), B: Held(2), C: Held(2)}
    long, short = sorted(tree.children(trunk), key=lambda edge: -len(edge.blocks))
    assert (tree.owners(long), tree.owners(short)) == ({A: Held(2), B: Held(1)}, {C: Held(1)})
    assert tree.children(long) == []
    for depth, hashed in enumerate(chain(1, 2, 3, 4), start=1):
        edge, up_to = (trunk, depth) if depth <= 2 else (long, depth - 2)
        assert tree.locate(hashed.to_bytes(8, "little")) == (edge, up_to)
    assert tree.locate(chain(1, 2, 9)[-1].to_bytes(8, "little")) == (short, 1)
    assert tree.locate(packed([12345])) is None
    counts = [held.blocks for held in tree.owners(long).values()] + [tree.num_blocks_of(B), up_to]
    assert all(type(count) is int for count in counts)
    located = tree.locate(packed(chain(1)))
    assert located is not None
    assert type(located[1]) is int


def test_the_last_block_of_a_match_is_the_last_that_somebody_holds() -> None:
    tree = RadixTree()
    store(tree, A, [1, 2, 3])
    store(tree, A, [1, 2, 8])
    for query, depth in (([1, 9], 1), ([1, 2], 2), ([1, 2, 3, 4], 3)):
        assert tree.find(blocks(*query)).last_block == packed(chain(*query)[:depth][-1:])
    assert tree.find(blocks(9)).last_block == b""


def test_only_workers_with_lower_homes_have_more_than_one_bit_and_they_are_used_again() -> None:
    tree = RadixTree()
    for incarnation in range(1, 50):
        tree.remove_worker(("a", incarnation - 1))
        store(tree, ("a", incarnation), [1, 2])
        tree.clear(("a", incarnation))
        store(tree, ("a", incarnation), [1, 2], home=DISK)
        store(tree, B, [1, 2])
        assert lower(tree, 1, 2) == {("a", incarnation): [0, 2], B: [0, 0]}
        assert len(tree._holders.bits(B)) == 1
    assert len(tree._holders.names) == 4
    tree.remove_worker(("a", 49))
    assert tree._holders.nearer == 0
    assert found(tree, 1, 2) == {B: 2}


def test_the_edge_of_a_single_worker_is_made_longer_until_it_has_its_full_length() -> None:
    """The last run that it takes may go beyond, by less than a run."""
    tree = RadixTree()
    store(tree, A, [20_000])
    length, step = MAX_EXTENDED_BYTES // HASH_BYTES, 100
    path = np.arange(1, 2 * (length + step - length % step) + 1)
    hashes, sequences = blocks(*path), sequence_hashes(blocks(*path))
    for start in range(0, len(path), step):
        parent = int(sequences[start - 1]) if start else None
        tree.apply_stored(B, parent, hashes[start : start + step].tobytes(), sequences[start : start + step].tobytes())
    assert tree.num_edges == 1 + 2
    assert found(tree, *path) == {B: len(path)}
    check_structure(tree)
