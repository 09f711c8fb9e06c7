from dataclasses import replace

import numpy as np
from hypothesis import given, strategies as st

from kvtransfer.slab.byte_runs import byte_ranges, paired_runs
from tests.kvtransfer.peers import LAYOUT, PREFILL_LAYOUT

SIZE = LAYOUT.block_bytes
ALL = range(LAYOUT.num_kv_heads)


@given(st.data(), st.integers(0, LAYOUT.num_layers - 1))
def test_copying_the_runs_is_copying_block_by_block(data: st.DataObject, layer: int) -> None:
    destination = data.draw(st.lists(st.integers(0, LAYOUT.num_blocks - 1), unique=True, max_size=12))
    source = [data.draw(st.integers(0, PREFILL_LAYOUT.num_blocks - 1)) for _ in destination]
    ours = np.arange(PREFILL_LAYOUT.nbytes // 4, dtype=np.uint32).view(np.uint8)
    by_run, by_block = np.zeros(LAYOUT.nbytes, np.uint8), np.zeros(LAYOUT.nbytes, np.uint8)
    for run in paired_runs(PREFILL_LAYOUT, LAYOUT, layer, source, destination, ALL, ALL):
        by_run[run.destination : run.destination + run.nbytes] = ours[run.source : run.source + run.nbytes]
    for from_block, to_block in zip(source, destination, strict=True):
        begin, to = PREFILL_LAYOUT.offset(layer, from_block), LAYOUT.offset(layer, to_block)
        by_block[to : to + SIZE] = ours[begin : begin + SIZE]
    assert np.array_equal(by_run, by_block)


def test_neighbours_on_both_sides_become_one_run() -> None:
    runs = paired_runs(PREFILL_LAYOUT, LAYOUT, 1, [10, 11, 12, 20, 21], [3, 4, 5, 6, 9], ALL, ALL)
    base, to = PREFILL_LAYOUT.offset(1, 0), LAYOUT.offset(1, 0)
    assert [(run.source - base, run.destination - to, run.nbytes) for run in runs] == [
        (10 * SIZE, 3 * SIZE, 3 * SIZE),
        (20 * SIZE, 6 * SIZE, SIZE),
        (21 * SIZE, 9 * SIZE, SIZE),
    ]


def test_ranges_of_one_slab_keep_the_order_of_the_list() -> None:
    base = LAYOUT.offset(2, 0)
    assert byte_ranges(LAYOUT, 2, [7, 8, 2], ALL) == [
        (base + 7 * SIZE, base + 9 * SIZE),
        (base + 2 * SIZE, base + 3 * SIZE),
    ]
    assert byte_ranges(LAYOUT, 2, [], ALL) == []


@given(st.data(), st.integers(0, LAYOUT.num_layers - 1))
def test_some_heads_of_blocks_go_to_other_heads_of_a_slab_of_another_width(data: st.DataObject, layer: int) -> None:
    wide, narrow = replace(PREFILL_LAYOUT, num_kv_heads=4), replace(LAYOUT, num_kv_heads=3)
    count = data.draw(st.integers(1, 3))
    from_head, to_head = data.draw(st.integers(0, 4 - count)), data.draw(st.integers(0, 3 - count))
    from_heads, to_heads = range(from_head, from_head + count), range(to_head, to_head + count)
    destination = data.draw(st.lists(st.integers(0, narrow.num_blocks - 1), unique=True, max_size=6))
    source = [data.draw(st.integers(0, wide.num_blocks - 1)) for _ in destination]
    ours = np.arange(wide.nbytes // 4, dtype=np.uint32).reshape(wide.shape)
    by_run = np.zeros(narrow.nbytes, np.uint8)
    for run in paired_runs(wide, narrow, layer, source, destination, from_heads, to_heads):
        by_run[run.destination : run.destination + run.nbytes] = ours.view(np.uint8).reshape(-1)[
            run.source : run.source + run.nbytes
        ]
    by_head = np.zeros(narrow.shape, np.uint32)
    for from_block, to_block in zip(source, destination, strict=True):
        by_head[layer, to_block, to_heads] = ours[layer, from_block, from_heads]
    assert np.array_equal(by_run.view(np.uint32).reshape(narrow.shape), by_head)


def test_some_heads_of_neighbours_stay_runs_of_their_own() -> None:
    begin, half = LAYOUT.offset(0, 3, 1), SIZE // 2
    assert byte_ranges(LAYOUT, 0, [3, 4], range(1, 2)) == [(begin, begin + half), (begin + SIZE, begin + SIZE + half)]
