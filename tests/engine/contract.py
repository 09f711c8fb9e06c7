"""What every engine keeps, whatever it is: one function for each clause of engine/interface.py.

Without pytest, because vLLM's run in an environment that has none: tests/vllm/test_contract.py.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from baton_proto.kv_events import Cleared, KvEvent, Removed, Stored
from baton_proto.sampling import SamplingParams
from baton_proto.worker import TAGS
from engine.interface import Engine
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence, SequenceStatus
from runtime.errors import ModelError, UnavailableError
from worker.engines.base import EngineAssembly

PATIENCE_S = 60.0
NUM_BLOCKS = 3  # of a prompt, and one token
T = TypeVar("T")


class Subject:
    """An engine with its loop. `news` of a sequence wait under its id; `events` are those of its steps."""

    def __init__(self, assembly: EngineAssembly) -> None:
        self.assembly = assembly
        self.events: list[KvEvent] = []
        self._news: dict[str, asyncio.Queue[SequenceOutput]] = {}
        self._event_loop = asyncio.get_running_loop()
        self.loop = assembly.make_loop(lambda output: self._pass(self._take, output))
        self.loop.start()
        self._serial = 0

    def prompt(self, number: int) -> list[int]:
        """Another one for each number."""
        return [20 + (number * 37 + at * 7) % 400 for at in range(NUM_BLOCKS * self.assembly.layout.block_size + 1)]

    def sequence(self, number: int = 1, **sampling: Any) -> Sequence:
        self._serial += 1
        tokens = self.prompt(number)
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | sampling)
        sequence = Sequence(f"contract-{self._serial}", tokens, len(tokens), params)
        self._news[sequence.request_id] = asyncio.Queue()
        return sequence

    async def call(self, work: Callable[[Engine], T]) -> T:
        """The result, and everything that the loop had told before it."""
        done: asyncio.Future[Future[T]] = self._event_loop.create_future()
        self.loop.call(work).add_done_callback(lambda one: self._pass(done.set_result, one))
        return (await asyncio.wait_for(done, PATIENCE_S)).result()

    async def next(self, sequence: Sequence) -> SequenceOutput:
        return await asyncio.wait_for(self._news[sequence.request_id].get(), PATIENCE_S)

    async def rest(self, sequence: Sequence) -> tuple[list[int], SequenceOutput]:
        """The tokens until the end, and the news with the end. Nothing follows it."""
        tokens: list[int] = []
        while True:
            news = await self.next(sequence)
            tokens += news.token_ids
            if news.finish is not None:
                assert self._news[sequence.request_id].empty()
                return tokens, news

    async def answer(self, sequence: Sequence) -> tuple[list[int], SequenceOutput]:
        await self.call(lambda engine: engine.add(sequence))
        return await self.rest(sequence)

    async def until(self, holds: Callable[[Engine], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await self.call(holds):
                await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Nothing runs, no block is in use, and the books are right."""

        def is_idle(engine: Engine) -> bool:
            load = engine.load()
            return (load.running, load.waiting, load.blocks_used, load.queued_prefill_tokens) == (0, 0, 0, 0)

        await self.until(is_idle)
        assert await self.call(lambda engine: engine.check_integrity()) == []

    async def close(self) -> None:
        await asyncio.to_thread(self.loop.stop, PATIENCE_S)
        self.assembly.close()

    def _pass(self, function: Callable[[T], None], value: T) -> None:
        self._event_loop.call_soon_threadsafe(function, value)

    def _take(self, output: StepOutput) -> None:
        self.events += output.events
        for one in output.outputs:
            self._news[one.sequence.request_id].put_nowait(one)


async def an_answer_has_as_many_tokens_as_asked_for_and_then_its_end(subject: Subject) -> None:
    sequence = subject.sequence()
    tokens, last = await subject.answer(sequence)
    assert (len(tokens), last.finish, last.error) == (6, "length", None)
    assert sequence.token_ids == subject.prompt(1) + tokens
    assert sequence.status is SequenceStatus.FINISHED
    assert 0 <= sequence.num_cached_tokens < sequence.num_prompt_tokens
    assert sum(chunk[2] for chunk in sequence.chunks) == sequence.num_prompt_tokens - sequence.num_cached_tokens
    await subject.until_idle()


async def answers_of_many_are_those_of_each_alone(subject: Subject) -> None:
    alone = [(await subject.answer(subject.sequence(number)))[0] for number in range(4)]
    together = await asyncio.gather(*(subject.answer(subject.sequence(number)) for number in range(4)))
    assert [tokens for tokens, _ in together] == alone
    await subject.until_idle()


async def an_answer_ends_with_its_stop_token(subject: Subject) -> None:
    tokens, _ = await subject.answer(subject.sequence())
    stop = tokens[2]
    cut, last = await subject.answer(subject.sequence(stop_token_ids=(stop,)))
    assert cut == tokens[: tokens.index(stop) + 1]
    assert (last.finish, last.stop_token) == ("stop", stop)


async def whoever_is_aborted_says_no_more_and_leaves_nothing(subject: Subject) -> None:
    sequence, other = subject.sequence(max_tokens=400), subject.sequence(2)
    await subject.call(lambda engine: (engine.add(sequence), engine.add(other)))
    await subject.next(sequence)
    assert await subject.call(lambda engine: engine.abort(sequence.request_id)) is sequence
    assert await subject.call(lambda engine: engine.abort(sequence.request_id)) is None
    told = subject._news[sequence.request_id].qsize()
    assert len((await subject.rest(other))[0]) == 6
    await subject.until_idle()
    assert subject._news[sequence.request_id].qsize() == told


async def the_load_is_that_of_the_moment(subject: Subject) -> None:
    sequence = subject.sequence(max_tokens=400)
    load = await subject.call(lambda engine: (engine.add(sequence), engine.load())[1])
    assert load.running + load.waiting == 1
    assert load.queued_prefill_tokens == sequence.num_prompt_tokens
    # vLLM keeps one block of its cache for itself.
    assert subject.assembly.layout.num_blocks - 1 <= load.blocks_total <= subject.assembly.layout.num_blocks
    await subject.next(sequence)
    load, pace = await subject.call(lambda engine: (engine.load(), engine.pace()))
    assert (load.running + load.waiting, load.queued_prefill_tokens) == (1, 0)
    assert pace.context_tokens >= sequence.num_prompt_tokens
    await subject.call(lambda engine: engine.abort(sequence.request_id))
    await subject.until_idle()
    assert (await subject.call(lambda engine: engine.pace())).context_tokens == 0


async def computed_prompts_are_counted_and_steps_are_told_once(subject: Subject) -> None:
    before = await subject.call(lambda engine: engine.counts().prompt_tokens)
    sequence = subject.sequence(50)
    await subject.answer(sequence)
    counted = await subject.call(lambda engine: engine.counts().prompt_tokens)
    assert counted - before == sequence.num_prompt_tokens - sequence.num_cached_tokens
    await subject.call(lambda engine: engine.pace())
    assert (await subject.call(lambda engine: engine.pace())).steps == []


async def the_events_add_up_to_the_snapshot(subject: Subject) -> None:
    for number in range(3):
        await subject.answer(subject.sequence(60 + number))
    events, runs = await subject.call(lambda engine: engine.snapshot())
    known: set[bytes] = set()
    for event in subject.events + events:
        match event:
            case Stored():
                known |= _hashes(event)
            case Removed():
                known -= _hashes(event)
            case Cleared():
                known.clear()
    assert known == set().union(*map(_hashes, runs))


async def calls_run_in_their_order_and_what_one_raises_reaches_its_caller(subject: Subject) -> None:
    ran: list[int] = []
    calls = [subject.call(lambda _, number=number: ran.append(number)) for number in range(20)]
    await asyncio.gather(*calls)
    assert ran == list(range(20))
    assert isinstance(await raised(subject.call(lambda _: 1 // 0)), ZeroDivisionError)
    assert await subject.call(lambda _: "alive") == "alive"


async def whoever_sleeps_serves_again_when_woken_and_others_say_why_not(subject: Subject) -> None:
    before, _ = await subject.answer(subject.sequence())
    await subject.until_idle()
    memory = subject.assembly.memory
    assert memory.asleep == ()
    await subject.call(lambda engine: subject.events.extend(engine.forget_cache(keep=False)))
    refused = await raised(fall_asleep(subject))
    assert memory.asleep == (TAGS if refused is None else ())
    assert refused is None or isinstance(refused, UnavailableError)
    await done(await subject.call(lambda _: memory.wake(TAGS)))
    assert (memory.asleep, memory.problem) == ((), "")
    assert (await subject.answer(subject.sequence()))[0] == before


async def weights_that_do_not_fit_are_refused_and_the_others_stay(subject: Subject) -> None:
    memory = subject.assembly.memory
    before = memory.fingerprint
    assert isinstance(await raised(asyncio.to_thread(memory.opened, Path("/nowhere"))), ModelError)
    assert (memory.fingerprint, memory.problem) == (before, "")


async def blocks_for_kv_from_elsewhere_are_kept_until_it_comes_or_nobody_writes_it(subject: Subject) -> None:
    """Of an engine that shares KV."""
    kv = subject.assembly.kv
    if kv is None:
        return
    come, gone = subject.sequence(70), subject.sequence(71)
    for sequence in (come, gone):
        await subject.until(lambda _, sequence=sequence: kv.engine.reserve(sequence))
        assert sequence.status is SequenceStatus.REMOTE
        assert len(sequence.block_table) >= NUM_BLOCKS + 1
    assert (await subject.call(lambda engine: engine.load())).blocks_used >= 2 * (NUM_BLOCKS + 1)
    await subject.call(lambda _: kv.engine.release(gone))
    await subject.call(lambda _: kv.engine.forgo(subject.sequence(72)))
    first = await subject.call(lambda _: kv.engine.admit(come, 100, None))
    tokens, last = await subject.rest(come)
    assert ([] if first is None else first.token_ids) in ([], [100])
    assert (len(tokens) + (first is not None), last.finish) == (6, "length")
    await subject.until_idle()


async def plain_requests_are_served(subject: Subject) -> None:
    limits = subject.assembly.limits
    plain = subject.sequence().sampling
    assert (limits.refuses(plain), limits.repeats(plain)) == ("", False)


async def a_loop_that_has_ended_refuses_calls_and_leaves_nobody_waiting(subject: Subject) -> None:
    """The last one."""
    await asyncio.to_thread(subject.loop.stop, PATIENCE_S)
    await asyncio.to_thread(subject.loop.stop, PATIENCE_S)
    assert subject.loop.ended.result(0) is None
    assert isinstance(await raised(subject.call(lambda _: None)), UnavailableError)


def _hashes(event: Stored | Removed) -> set[bytes]:
    data = event.sequence_hashes
    return {data[at : at + 8] for at in range(0, len(data), 8)}


async def raised(work: Awaitable[object]) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


async def fall_asleep(subject: Subject) -> int:
    return await done(await subject.call(lambda _: subject.assembly.memory.sleep(1)))


async def done(result: T | Awaitable[T]) -> T:
    return await result if isinstance(result, Awaitable) else result


CONTRACT: tuple[Callable[[Subject], Awaitable[None]], ...] = (
    an_answer_has_as_many_tokens_as_asked_for_and_then_its_end,
    answers_of_many_are_those_of_each_alone,
    an_answer_ends_with_its_stop_token,
    whoever_is_aborted_says_no_more_and_leaves_nothing,
    the_load_is_that_of_the_moment,
    computed_prompts_are_counted_and_steps_are_told_once,
    the_events_add_up_to_the_snapshot,
    calls_run_in_their_order_and_what_one_raises_reaches_its_caller,
    whoever_sleeps_serves_again_when_woken_and_others_say_why_not,
    weights_that_do_not_fit_are_refused_and_the_others_stay,
    blocks_for_kv_from_elsewhere_are_kept_until_it_comes_or_nobody_writes_it,
    plain_requests_are_served,
    a_loop_that_has_ended_refuses_calls_and_leaves_nobody_waiting,
)
