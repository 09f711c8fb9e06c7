"""Whatever is guessed, and whatever happens to a sequence meanwhile, it says what it would have said."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine.core.engine import Engine
from engine.drafts import speculation
from engine.sequences.sequence import Sequence
from runtime.blocks.block_hash import block_hashes, sequence_hashes
from tests.engine.drafts.guesses import Guesses
from tests.engine.kv_oracle import EventReplica, FakeRunner, make_engine, make_sequence, sequential_answer, snapshot

BLOCK_SIZE = 4
MAX_STEPS = 2000


@pytest.fixture(autouse=True, scope="module")
def trusted() -> Iterator[None]:
    """Wrong guesses are forgiven, so that there are always drafts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "TRIAL", 1e6)
        patch.setattr(speculation, "FULL", 1e6)
        yield


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    max_tokens: int
    told: int  # tokens of the answer that another worker has told
    is_remote: bool  # whether a prefill worker computes the prompt
    comes: int  # at this step
    leaves: int  # after so many tokens, as a router does that finds a stop string

    @property
    def answer(self) -> list[int]:
        return sequential_answer(self.prompt, self.max_tokens)


REQUESTS = st.lists(
    st.builds(
        Request,
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 24),
        told=st.integers(0, 8),
        is_remote=st.booleans(),
        comes=st.integers(0, 20),
        leaves=st.integers(1, 60),
    ),
    min_size=1,
    max_size=6,
)


@dataclass
class Served:
    """An engine with requests, whose outputs, events and books are checked at each step."""

    engine: Engine
    runner: FakeRunner
    requests: list[Request]
    said: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    replica: EventReplica = field(default_factory=EventReplica)
    told: set[int] = field(default_factory=set)  # hashes of all blocks that events named
    reserved: dict[str, Sequence] = field(default_factory=dict)

    def run(self) -> None:
        for step in range(MAX_STEPS):
            for index, request in enumerate(self.requests):
                if request.comes == step:
                    self.come(f"r{index}", request)
            self.admit()
            output = self.engine.step()
            self.replica.apply(output.events)
            self.told |= set(self.replica.parents)
            for one in output.outputs:
                assert one.error is None
                self.take(one.sequence.request_id, one.token_ids, one.finish)
            assert self.engine.check_integrity() == []
            if len(self.said) == len(self.requests) and not self.reserved and not self.engine.has_work:
                return
        raise AssertionError("the engine does not come to an end")

    def come(self, name: str, request: Request) -> None:
        told = [] if request.is_remote else request.answer[: min(request.told, len(request.answer) - 1)]
        self.said[name] = list(told)
        sequence = make_sequence(
            name, request.prompt + told, num_prompt_tokens=len(request.prompt), max_tokens=request.max_tokens
        )
        if request.is_remote:
            self.reserved[name] = sequence
        else:
            self.engine.add(sequence)

    def admit(self) -> None:
        for name, sequence in list(self.reserved.items()):
            if self.engine.reserve(sequence):
                del self.reserved[name]
                prompt = sequence.token_ids
                self.runner.slab.write(sequence.block_table, prompt, sequence.num_computed_tokens, len(prompt))
                if self.runner.window:
                    held = next(at for at, place in enumerate(sequence.window_table) if place)
                    first = max(sequence.num_computed_tokens, held * BLOCK_SIZE)
                    self.runner.sliding.write(sequence.window_table, prompt, first, len(prompt))
                first = self.engine.admit(sequence, sequential_answer(prompt, 1)[0], None)
                self.take(name, first.token_ids, first.finish)

    def take(self, name: str, token_ids: list[int], finish: str | None) -> None:
        assert name not in self.ended, "nothing follows the end"
        self.said[name] += token_ids
        if finish is not None:
            self.ended.add(name)
        elif len(self.said[name]) >= self.requests[int(name[1:])].leaves:
            self.ended.add(name)
            self.engine.abort(name)

    def true_hashes(self) -> set[int]:
        """Of all blocks that may be told."""
        hashes: set[int] = set()
        for request in self.requests:
            tokens = np.array(request.prompt + request.answer, dtype=np.uint32)
            hashes |= set(sequence_hashes(block_hashes(tokens, BLOCK_SIZE)).tolist())
        return hashes


@given(
    requests=REQUESTS,
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_blocks=st.integers(10, 24),
    max_batch_tokens=st.sampled_from([3, 8, 32]),
    max_running=st.sampled_from([1, 3, 8]),
    depth=st.sampled_from([0, 1]),
    window=st.sampled_from([0, 0, 3, 6]),
)
@settings(max_examples=600, deadline=None)
def test_drafts_change_no_answer_and_leave_nothing_behind(
    requests: list[Request],
    right: float,
    num_blocks: int,
    max_batch_tokens: int,
    max_running: int,
    depth: int,
    window: int,
) -> None:
    drafter = Guesses(_answer_of({f"r{index}": request for index, request in enumerate(requests)}), right)
    engine, runner = make_engine(
        num_blocks,
        BLOCK_SIZE,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        depth=depth,
        drafter=drafter,
        window=window,
        spare_places=max_running,
    )
    served = Served(engine, runner, requests)
    served.run()
    for index, request in enumerate(requests):
        said = served.said[f"r{index}"]
        assert said == request.answer[: len(said)]
        assert len(said) == len(request.answer) or len(said) >= request.leaves
    assert snapshot(engine.block_manager) == served.replica.parents
    assert served.told <= served.true_hashes(), "a block with a wrong guess was told"
    assert engine.load().blocks_used == 0
    assert drafter.known == {}
    if right == 1.0:
        assert engine.speculation.num_accepted == engine.speculation.num_drafted
    assert all(batch.num_tokens <= max_batch_tokens for batch in runner.batches)
    rows = [sum(item.num_samples for item in batch.items) for batch in runner.batches]
    assert max(rows, default=0) <= len(requests) + speculation.FREE_ROWS


def _answer_of(requests: dict[str, Request]) -> Callable[[Sequence, int], list[int]]:
    def answer(sequence: Sequence, most: int) -> list[int]:
        known = sequence.next_position
        return requests[sequence.request_id].answer[known : known + most]

    return answer
