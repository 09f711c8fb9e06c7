"""The channel between ranks, with readers in processes of their own."""

import os
import random
import signal
import threading
import time

import pytest
from hypothesis import given, settings, strategies as st

from runtime.errors import RankLostError
from tests.engine.command_readers import Channel, digest
from tests.freezing import freeze
from tests.open_files import open_files


def payload(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def expected(payloads: list[bytes]) -> list[tuple[int, str]]:
    return [(len(one), digest(one)) for one in payloads]


def test_a_thousand_commands_reach_three_readers_in_order() -> None:
    payloads = [payload(seed % 300, seed) for seed in range(1000)]
    with Channel(readers=3) as channel:
        for number, one in enumerate(payloads, start=1):
            assert channel.writer.send(one) == number
        channel.writer.wait_done(1000, timeout_s=60)
        for reader in channel.readers:
            assert reader.heard(1000) == expected(payloads)


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 17, (1 << 16) - 16, (1 << 16) + 1, 1 << 20, 50 << 20])
def test_a_command_may_have_any_size(size: int) -> None:
    with Channel(readers=2) as channel:
        payloads = [payload(size), b"after it"]
        for one in payloads:
            channel.writer.send(one)
        channel.writer.wait_done(2, timeout_s=60)
        for reader in channel.readers:
            assert reader.heard(2) == expected(payloads)


def test_commands_of_several_threads_reach_all_readers_whole_and_in_one_order() -> None:
    payloads = [[payload(8 + seed, 1000 * thread + seed) for seed in range(300)] for thread in range(4)]
    with Channel(readers=2, unread_bytes=4096) as channel:
        threads = [
            threading.Thread(target=lambda own=own: [channel.writer.send(one) for one in own]) for own in payloads
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        channel.writer.wait_done(1200, timeout_s=60)
        first, second = (reader.heard(1200) for reader in channel.readers)
        assert first == second
        for own in payloads:
            due = expected(own)
            assert [one for one in first if one in due] == due


def test_a_wait_ends_though_another_thread_has_taken_the_news() -> None:
    with Channel(readers=1) as channel:
        freeze(channel.readers[0].process.pid)
        sequence = channel.writer.send(b"command")
        original, waiting = channel.writer._wait, threading.Event()

        def wait_late(descriptors: list[int], event: int, deadline_s: float) -> bool:
            """The other thread comes between the question and the wait."""
            waiting.set()
            while channel.writer.behind(sequence):
                time.sleep(0.001)
            return original(descriptors, event, deadline_s)

        channel.writer._wait = wait_late  # type: ignore[method-assign]
        waiter = threading.Thread(target=channel.writer.wait_done, args=(sequence, 60))
        waiter.start()
        assert waiting.wait(10)
        os.kill(channel.readers[0].process.pid, signal.SIGCONT)
        waiter.join(30)
        assert not waiter.is_alive()


def test_any_sequence_of_sizes_goes_through_a_small_buffer() -> None:
    with Channel(readers=2, unread_bytes=4096) as channel:

        @settings(max_examples=40, deadline=None)
        @given(st.lists(st.integers(0, 20000), max_size=12))
        def check(sizes: list[int]) -> None:
            payloads = [payload(size, seed) for seed, size in enumerate(sizes)]
            for one in payloads:
                channel.writer.send(one)
            channel.writer.wait_done(channel.writer.sequence, timeout_s=60)
            for reader in channel.readers:
                assert reader.heard(len(payloads)) == expected(payloads)

        check()


def test_who_waits_for_a_reader_that_is_killed_hears_of_it_at_once() -> None:
    with Channel(readers=3, mode="silent") as channel:
        sequence = channel.writer.send(b"never done")
        channel.readers[1].process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(RankLostError, match=rf"pid {channel.readers[1].process.pid}\) ended with -9"):
            channel.writer.wait_done(sequence, timeout_s=30)
        assert time.monotonic() - killed_s < 15, "half of what it would have waited"


def test_who_waits_for_room_hears_of_a_dead_reader_too() -> None:
    with Channel(readers=2, mode="silent") as channel:
        channel.readers[0].process.send_signal(signal.SIGKILL)
        with pytest.raises(RankLostError, match="ended with -9"):
            channel.writer.send(payload(1 << 20))


def test_a_reader_that_stands_still_hits_the_deadline() -> None:
    with Channel(readers=2) as channel:
        channel.writer.wait_done(channel.writer.send(b"first"), timeout_s=60)
        freeze(channel.readers[1].process.pid)
        with pytest.raises(RankLostError, match=r"has not done command 2 within 0\.2 s"):
            channel.writer.wait_done(channel.writer.send(b"second"), timeout_s=0.2)
        assert channel.writer.behind(2) == [1]
        with pytest.raises(RankLostError, match=r"has not taken a command within 0\.2 s"):
            channel.writer.send(payload(1 << 20), timeout_s=0.2)


def test_a_reader_that_goes_on_catches_up() -> None:
    payloads = [payload(5000, seed) for seed in range(12)]
    with Channel(readers=1) as channel:
        freeze(channel.readers[0].process.pid)
        for one in payloads:
            channel.writer.send(one)
        assert channel.writer.behind(1) == [0]
        os.kill(channel.readers[0].process.pid, signal.SIGCONT)
        channel.writer.wait_done(12, timeout_s=60)
        assert channel.readers[0].heard(12) == expected(payloads)


def test_two_channels_do_not_meet() -> None:
    with Channel(readers=2) as one, Channel(readers=2) as other:
        for number in range(50):
            one.writer.send(b"one %d" % number)
            other.writer.send(b"other %d" % number)
        for channel, text in ((one, b"one %d"), (other, b"other %d")):
            channel.writer.wait_done(50, timeout_s=60)
            for reader in channel.readers:
                assert reader.heard(50) == expected([text % number for number in range(50)])


def test_no_descriptor_is_left_when_a_channel_is_closed() -> None:
    before = open_files()
    with Channel(readers=3) as channel:
        channel.writer.wait_done(channel.writer.send(b"command"), timeout_s=60)
        assert open_files() > before
    channel.writer.close()  # once more does no harm
    assert open_files() <= before
