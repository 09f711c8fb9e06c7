"""The time that is told of a block is the disk's, however many threads read."""

import random

import pytest

from engine.tiers.read_times import ReadTimes


def test_no_disk_is_slow_before_its_first_read() -> None:
    times = ReadTimes()
    assert times.block_s == 0.0
    times.begin(1, 5.0)
    assert (times.block_s, times.longest_s(7.5)) == (0.0, 2.5)


def test_the_first_end_of_several_reads_at_a_time_tells_what_all_of_them_take() -> None:
    times = ReadTimes()
    for copy in range(3):
        times.begin(copy, 0.0)
    times.end(0, 0.006)
    assert times.block_s == pytest.approx(0.002)


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_many_reads_take_as_long_as_the_pool_took_for_them(threads: int) -> None:
    """Each takes about 10 ms on its thread, in any order of ends."""
    times, source = ReadTimes(), random.Random(threads)
    ends = dict.fromkeys(range(threads), 0.0)
    for copy in ends:
        times.begin(copy, 0.0)
        ends[copy] = source.uniform(0.008, 0.012)
    for copy in range(threads, 400):
        first = min(ends, key=lambda one: ends[one])
        now_s = ends.pop(first)
        times.end(first, now_s)
        times.begin(copy, now_s)
        ends[copy] = now_s + source.uniform(0.008, 0.012)
        assert times.longest_s(now_s) < 0.012
    assert times.block_s == pytest.approx(0.010 / threads, rel=0.1)


def test_nothing_is_late_where_nothing_is_read() -> None:
    times = ReadTimes()
    times.begin(1, 0.0)
    times.end(1, 9.0)
    assert times.longest_s(100.0) == 0.0
