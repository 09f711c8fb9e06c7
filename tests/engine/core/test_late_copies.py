"""The engine beside a tier that is slow to enqueue its copies: a step comes after those that it needs, and others go
on."""

import random
from collections.abc import Iterator, MutableMapping, Sequence as Run

import pytest

from engine.blocks.block_manager import BlockManager
from engine.blocks.window_blocks import most_held
from engine.core.engine import Engine
from engine.sequences.batch import LayerDone
from engine.sequences.moves import Move
from engine.sequences.sequence import Sequence
from runtime.errors import UnavailableError
from tests.engine.blocks.fake_tiers import LateMove, LateSlots
from tests.engine.core.test_scheduler import names
from tests.engine.kv_oracle import Batch, FakeRunner, FakeSlab, FakeStep, make_sequence, sequential_answer

BLOCK_SIZE = 4


class Content(MutableMapping[int, tuple[int, ...]]):
    """What the blocks of a slab hold, and behind them the places of layers with a window."""

    def __init__(self, slab: FakeSlab, num_blocks: int, sliding: FakeSlab) -> None:
        self._slab, self._num_blocks, self._sliding = slab, num_blocks, sliding

    def _home(self, block: int) -> tuple[FakeSlab, int]:
        return (self._sliding, block - self._num_blocks) if block >= self._num_blocks else (self._slab, block)

    def __getitem__(self, block: int) -> tuple[int, ...]:
        slab, block = self._home(block)
        return tuple(slab.values.get((block, place), -1) for place in range(BLOCK_SIZE))

    def __setitem__(self, block: int, values: tuple[int, ...]) -> None:
        slab, block = self._home(block)
        slab.values.update(((block, place), value) for place, value in enumerate(values))

    def __delitem__(self, block: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class Runner(FakeRunner):
    """Refuses a step whose copies are not made, which it would read."""

    def __init__(self, depth: int, window: int) -> None:
        super().__init__(BLOCK_SIZE, depth, window)
        self.steps: list[FakeStep] = []

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> FakeStep:
        assert not any(move.left_s() for move in batch.moves())
        self.steps.append(super().submit(batch, layer_done))
        return self.steps[-1]


class Tier(LateSlots):
    """Slow to enqueue its copies. Those to the device come after the steps that were on their way when they were asked
    for, because these may read the places."""

    def __init__(self, num_slots: int, content: Content, runner: Runner) -> None:
        super().__init__(num_slots, content, slow=True)
        self.runner = runner

    def load(self, slots: Run[int], blocks: Run[int]) -> Move | None:
        steps, move = self.runner.steps[-2:], super().load(slots, blocks)
        assert isinstance(move, LateMove)
        copy, move.copy = move.copy, lambda: [*[step.run() for step in steps], copy()]
        return move


class Late:
    """An engine with a few blocks, above a tier that is told when to enqueue and when to copy."""

    def __init__(self, num_blocks: int, num_slots: int, depth: int = 0, window: int = 0) -> None:
        self.runner = Runner(depth, window)
        content = Content(self.runner.slab, num_blocks, self.runner.sliding)
        self.tier = Tier(num_slots, content, self.runner)
        self.tier.spare = 0
        self.tier.num_window_slots, self.tier.first_place = num_slots, num_blocks
        places = 1 + most_held(window, BLOCK_SIZE) + 8 if window else 0
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, self.tier, window=window, num_window_blocks=places)
        self.engine = Engine(self.runner, self.manager, max_batch_tokens=32, max_running=8, eos_token_ids=frozenset())
        self.engine.block_manager.tiers.step_s = lambda: 1.0  # whatever is enqueued is near
        self.answers: dict[Sequence, list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = make_sequence(name, prompt, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add(sequence)
        self.answers[sequence] = []
        return sequence

    def step(self) -> tuple[list[str], list[str]]:
        """Names of the prompts and decodes that it computed."""
        before = len(self.runner.batches)
        for output in self.engine.step().outputs:
            assert output.error is None
            self.answers[output.sequence] += output.token_ids
        assert self.engine.check_integrity() == []
        return names(self.runner.batches[-1]) if len(self.runner.batches) > before else ([], [])

    def until_done(self, sequence: Sequence) -> None:
        while sequence.request_id in self.engine._sequences:
            self.step()


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens += sequential_answer(tokens, len(prompt) + max_tokens - len(tokens))
    return tokens[len(prompt) :]


@pytest.fixture
def late() -> Late:
    """A prefix of three blocks lies in the lower tier but for its beginning, and a reader has one of five blocks."""
    late = Late(5, 8)
    late.until_done(late.add("first", list(range(13)), 1))
    late.until_done(late.add("second", list(range(100, 113)), 1))
    while late.tier.moves:
        late.tier.work()
    late.add("reader", [1], 9)
    late.step()
    while late.tier.moves:
        late.tier.work()
    return late


def test_readers_pass_a_prompt_whose_copies_are_not_enqueued(late: Late) -> None:
    restored = late.add("restored", list(range(9)), 1)
    assert late.step() == ([], ["reader"])
    assert restored.block_table
    assert len(late.tier.moves) == 2, "what makes room, and the prefix"
    late.tier.enqueue()
    assert late.step() == ([], ["reader"])
    late.tier.enqueue()
    assert late.step() == (["restored"], ["reader"])
    assert restored.num_cached_tokens == 8
    assert late.answers[restored] == answer(list(range(9)), 1)


def test_a_prompt_that_is_alone_waits_for_its_copies(late: Late) -> None:
    late.engine.abort("reader")
    late.add("restored", list(range(9)), 1)
    assert late.step() == (["restored"], [])


def test_a_reader_whose_new_block_is_still_being_emptied_is_passed_by_others() -> None:
    late = Late(4, 8)
    late.until_done(late.add("first", list(range(13)), 1))
    one, two = (late.add(name, [token], 9) for token, name in enumerate(("one", "two")))
    while two.is_prefilling or not two.block_table:
        late.step()
        while late.tier.moves:
            late.tier.work()
    for _ in range(9):
        computed = late.step()
        if one.moves or two.moves:
            break
    assert len(computed[1]) == 1, "the other one needs a block"
    late.tier.enqueue()
    for sequence in (one, two):
        late.until_done(sequence)
        assert late.answers[sequence] == answer(sequence.token_ids[:1], 9)


def test_copies_that_cannot_be_enqueued_end_the_engine_and_no_request_is_told_an_error(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: LateMove) -> bool:
        raise UnavailableError("CUDA: out of memory")

    late.add("restored", list(range(9)), 1)
    monkeypatch.setattr(LateMove, "is_enqueued", refuse)
    with pytest.raises(UnavailableError, match="out of memory"):
        late.step()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("seed", range(4))
def test_whenever_copies_are_enqueued_and_made_answers_are_those_of_a_model_alone(
    seed: int, window: int, depth: int
) -> None:
    dice = random.Random(seed)
    late = Late(14, 20, depth, window)
    late.tier.spare = 2
    beginnings = [[dice.randrange(60) for _ in range(17)] for _ in range(5)]
    num_left_out = 0
    for number in range(120):
        prompt = dice.choice(beginnings)[: dice.choice((9, 17))] + [
            dice.randrange(60) for _ in range(dice.randrange(6))
        ]
        late.add(str(number), prompt, dice.randrange(1, 7))
        while len(late.engine._sequences) > dice.randrange(5):
            late.step()
            num_left_out += any(not move.is_enqueued() for one in late.engine.scheduler.running for move in one.moves)
            for _ in range(dice.randrange(3)):
                if len(late.tier.enqueued) < len(late.tier.moves):
                    late.tier.enqueue()
            if late.tier.enqueued and dice.randrange(2):
                late.tier.work()
    while late.engine.has_work:
        late.step()
    for sequence, tokens in late.answers.items():
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        assert tokens == answer(prompt, sequence.sampling.max_tokens)
    assert late.manager.tiers.num_raised > 20
    assert num_left_out > 10
