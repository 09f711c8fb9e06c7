"""What the scheduler's half of the connector tells: blocks reserved once, chunks, preempted and ended prompts."""

from types import SimpleNamespace
from typing import Any

from engine.vllm.kv.books import FETCH, PARAMETER, SEND, SharedRequests
from engine.vllm.kv.messages import Chunk, Reserved


def request(name: str, way: str | None, num_tokens: int = 70) -> Any:
    parameters = None if way is None else {PARAMETER: way}
    return SimpleNamespace(request_id=name, num_tokens=num_tokens, kv_transfer_params=parameters)


def scheduled(
    *, new: tuple[tuple[str, int, int, list[int]], ...] = (), more: Any = (), preempted: tuple[str, ...] = ()
) -> Any:
    """Rows of (name, computed tokens, tokens of this step, new blocks)."""
    return SimpleNamespace(
        preempted_req_ids={*preempted},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start, block_ids=(blocks,))
            for name, start, _, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in more],
            num_computed_tokens=[row[1] for row in more],
            new_block_ids=[(row[3],) if row[3] else None for row in more],
        ),
        num_scheduled_tokens={row[0]: row[2] for row in (*new, *more)},
    )


def test_a_request_fetches_all_behind_its_cached_prefix_and_after_a_preemption_nothing() -> None:
    books, fetching = SharedRequests(), request("one", FETCH)
    books.new_request(fetching)
    assert books.tokens_to_fetch(fetching, 0) == (70, True)
    assert books.tokens_to_fetch(fetching, 32) == (38, True)  # vLLM asks again while it has no blocks
    books.allocated(fetching, [4, 5, 6], 38)
    assert books.step(scheduled()).reserved == [Reserved("one", [4, 5, 6], 32)]
    books.allocated(fetching, [4, 5, 6], 0)  # the blocks that it decodes into
    assert books.tokens_to_fetch(fetching, 64) == (0, False)
    assert books.step(scheduled(new=(("one", 69, 1, [4, 5, 6]),), preempted=("one",))) == books.step(scheduled())
    assert not books.ended(fetching)


def test_others_are_left_alone() -> None:
    books, plain = SharedRequests(), request("plain", None)
    books.new_request(plain)
    assert books.tokens_to_fetch(plain, 0) == (0, False)
    books.allocated(plain, [1], 0)
    assert not books.step(scheduled(new=(("plain", 0, 70, [1, 2, 3]),))).chunks
    assert not books.ended(plain)
    assert not books.step(scheduled()).ended


def test_the_chunks_of_a_prompt_that_is_sent_are_told_until_it_ends() -> None:
    books, sending = SharedRequests(), request("one", SEND)
    books.new_request(sending)
    assert books.tokens_to_fetch(sending, 32) == (0, False)
    first = books.step(scheduled(new=(("one", 32, 20, [7, 8]),)))
    assert first.chunks == [Chunk("one", 32, 52, [7, 8])]
    assert books.step(scheduled(more=(("one", 52, 10, []),))).chunks == [Chunk("one", 52, 62, [])]
    assert books.step(scheduled(more=(("one", 62, 8, [9]),))).chunks == [Chunk("one", 62, 70, [9])]
    assert books.ended(sending), "vLLM keeps its blocks"
    assert books.step(scheduled()).ended == ["one"]
    assert not books.step(scheduled()).ended


def test_a_preempted_prompt_is_lost_once_and_is_told_no_more() -> None:
    books, sending = SharedRequests(), request("one", SEND)
    books.new_request(sending)
    books.step(scheduled(new=(("one", 0, 40, [7, 8]),)))
    assert books.step(scheduled(preempted=("one",))).lost == ["one"]
    again = books.step(scheduled(more=(("one", 0, 70, [3, 4, 5]),), preempted=("one",)))
    assert (again.chunks, again.lost) == ([], [])
    assert books.ended(sending)
