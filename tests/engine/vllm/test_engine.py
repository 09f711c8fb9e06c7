"""What a worker is told of vLLM's steps, with a core that says what the test wants: faults, late answers, orders."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton_proto.grammar import Grammar
from baton_proto.kv_events import Cleared, Stored
from baton_proto.sampling import SamplingParams
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence
from engine.vllm import memory as vllm_memory
from engine.vllm.cache import VllmCache, salt_of, seed_of
from engine.vllm.engine import VllmEngine
from engine.vllm.events.stream import Message
from engine.vllm.loop import VllmLoop
from engine.vllm.memory import VllmMemory
from router.api.wishes.prompt_logprobs import Row, rows_in_parts
from runtime.errors import UnavailableError
from tests.engine.vllm.events.vllm_engine import Messages

BLOCK = 4


class Core:
    """In the place of vLLM's core client: outputs are what the test puts, messages are written down."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[tuple[str, Any]] = []
        self.steps_to_come = 0  # until all blocks are free
        self.has_ended = False

    async def get_output_async(self) -> Any:
        output = await self.outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def add_request_async(self, request: Any) -> None:
        self.sent.append(("add", request))

    async def abort_requests_async(self, names: list[str]) -> None:
        self.sent.append(("abort", names))

    async def reset_prefix_cache_async(self) -> bool:
        if self.has_ended:
            raise ValueError("the core has ended")
        self.steps_to_come -= 1
        return self.steps_to_come < 0

    async def sleep_async(self, level: int) -> None:
        self.sent.append(("sleep", level))

    async def wake_up_async(self, tags: list[str]) -> None:
        self.sent.append(("wake", tags))


class NoEvents:
    """In the place of vLLM's event stream."""

    async def open(self) -> None: ...

    async def messages(self) -> Any:
        await asyncio.Event().wait()
        yield None

    async def close(self) -> None: ...


def step(*outputs: Any, running: int = 1) -> Any:
    details = SimpleNamespace(
        num_ctx_requests=1, num_ctx_tokens=3, num_generation_requests=1, elapsed_ms=7.0, is_dummy=False
    )
    stats = SimpleNamespace(num_running_reqs=running, kv_cache_usage=0.5, iteration_details=details)
    return SimpleNamespace(outputs=list(outputs), scheduler_stats=stats, timestamp=1.0)


def item(name: str, tokens: list[int], finish: str | None = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        new_token_ids=tokens,
        finish_reason=finish,
        new_logprobs=None,
        new_prompt_logprobs_tensors=None,
        pooling_output=None,
        events=None,
        prefill_stats=SimpleNamespace(num_cached_tokens=0),
    )


def sequence(name: str, **sampling: Any) -> Sequence:
    return Sequence(name, [5, 6, 7], 3, SamplingParams(max_tokens=9, **sampling))


class Scene:
    def __init__(self, request: Callable[[Sequence], Any]) -> None:
        self.core = Core()
        self.llm = SimpleNamespace(engine_core=self.core)
        self.cache = VllmCache(BLOCK, 10)
        self.engine = VllmEngine(self.llm, self.cache, frozenset({2}))
        self.engine._request = request  # type: ignore[method-assign]
        self.told: asyncio.Queue[StepOutput] = asyncio.Queue()
        self.loop = VllmLoop(self.engine, NoEvents(), self.told.put_nowait)  # type: ignore[arg-type]

    async def call(self, work: Callable[[VllmEngine], Any]) -> Any:
        return await asyncio.wrap_future(self.loop.call(work))

    async def news(self) -> StepOutput:
        return await asyncio.wait_for(self.told.get(), 60)

    async def close(self) -> None:
        await asyncio.to_thread(self.loop.stop, 10)


@pytest.fixture
async def scene() -> Any:
    scene = Scene(lambda one: one.request_id)
    scene.loop.start()
    yield scene
    await scene.close()


def begun(**sampling: Any) -> Sequence:
    """A replay: the client has the tokens 8 and 9."""
    return Sequence("one", [5, 6, 7, 8, 9], 3, SamplingParams(max_tokens=9, **sampling))


async def test_an_answer_with_a_penalty_begins_again_and_the_client_gets_what_it_has_not(scene: Scene) -> None:
    one = begun(presence_penalty=0.5)
    await scene.call(lambda engine: engine.add(one))
    assert scene.engine._prompt(one) == [5, 6, 7]
    scene.core.outputs.put_nowait(step(item("one", [8])))
    scene.core.outputs.put_nowait(step(item("one", [9, 4])))
    scene.core.outputs.put_nowait(step(item("one", [3], "length")))
    outputs: list[SequenceOutput] = []
    while not outputs or outputs[-1].finish is None:
        outputs += (await scene.news()).outputs
    assert [(output.token_ids, output.finish) for output in outputs] == [([4], None), ([3], "length")]
    assert one.token_ids == [5, 6, 7, 8, 9, 4, 3]
    assert one.chunks[0][2] == 3, "tokens of the prompt"
    assert scene.engine.check_integrity() == []


@pytest.mark.parametrize("news", [item("one", [8, 4]), item("one", [8], "stop")], ids=["another token", "an end"])
async def test_an_answer_that_takes_another_turn_when_it_begins_again_is_left_to_others(
    scene: Scene, news: Any
) -> None:
    await scene.call(lambda engine: engine.add(begun(frequency_penalty=0.5)))
    scene.core.outputs.put_nowait(step(news))
    (output,) = (await scene.news()).outputs
    assert (output.token_ids, output.finish, output.refused) == ([], "error", True)
    assert "other tokens than those already sent" in str(output.error)
    assert scene.core.sent[-1] == ("abort", ["one"])


async def test_any_other_answer_goes_on_behind_what_the_client_has(scene: Scene) -> None:
    one = begun(repetition_penalty=1.5)
    await scene.call(lambda engine: engine.add(one))
    assert scene.engine._prompt(one) == [5, 6, 7, 8, 9]
    scene.core.outputs.put_nowait(step(item("one", [8])))
    (output,) = (await scene.news()).outputs
    assert output.token_ids == [8]


async def test_the_news_of_a_step_come_together_and_end_with_the_stop_token(scene: Scene) -> None:
    one, two = sequence("one"), sequence("two")
    await scene.call(lambda engine: (engine.add(one), engine.add(two)))
    assert (await scene.call(lambda engine: engine.load())).queued_prefill_tokens == 6
    scene.core.outputs.put_nowait(step(item("one", [8]), item("two", [9, 2], "stop"), item("gone", [1])))
    told = await scene.news()
    assert [(out.sequence.request_id, out.token_ids, out.finish, out.stop_token) for out in told.outputs] == [
        ("one", [8], None, None),
        ("two", [9, 2], "stop", 2),
    ]
    assert one.token_ids == [5, 6, 7, 8]
    load = await scene.call(lambda engine: engine.load())
    assert (load.running, load.waiting, load.blocks_used, load.steps, load.step_ms) == (1, 0, 5, 1, 7.0)
    assert scene.engine.counts().prompt_tokens == 6
    (timed,) = scene.engine.timed_steps.take()
    assert (timed.prompt_tokens, timed.sequences, timed.step_ms) == (3, 1, 7.0)


async def test_log_probabilities_of_the_prompt_come_with_the_first_token(scene: Scene) -> None:
    """vLLM's rows have one column more than the alternatives that were asked for: the prompt's token comes first."""
    await scene.call(lambda engine: engine.add(sequence("one", prompt_logprobs=1)))
    first = item("one", [8])
    tensors = [[6, 4], [7, 7]], [[-3.0, -0.5], [-0.25, -0.25]], [9, 1]
    first.new_prompt_logprobs_tensors = tuple(torch.tensor(tensor) for tensor in tensors)
    scene.core.outputs.put_nowait(step(first))
    scene.core.outputs.put_nowait(step(item("one", [9])))
    (told,), (then,) = (await scene.news()).outputs, (await scene.news()).outputs
    assert told.prompt_logprobs is not None
    rows = [row for part in rows_in_parts(np.array([5, 6, 7], np.uint32), told.prompt_logprobs) for row in part]
    assert rows == [Row(5), Row(6, -3.0, 9, [(4, -0.5)]), Row(7, -0.25, 1, [(7, -0.25)])]
    assert then.prompt_logprobs is None


async def test_an_error_of_vllms_ends_the_request_with_its_reason(scene: Scene) -> None:
    await scene.call(lambda engine: engine.add(sequence("one")))
    scene.core.outputs.put_nowait(step(item("one", [], "error")))
    (out,) = (await scene.news()).outputs
    assert (out.finish, out.error) == ("error", "vLLM ended the request: error")
    assert (await scene.call(lambda engine: engine.load())).blocks_used == 0


async def test_an_answer_that_repeats_itself_ends_as_such(scene: Scene) -> None:
    await scene.call(lambda engine: engine.add(sequence("one")))
    scene.core.outputs.put_nowait(step(item("one", [9], "repetition")))
    (out,) = (await scene.news()).outputs
    assert (out.token_ids, out.finish, out.stop_token, out.error) == ([9], "repetition", None, None)


async def test_news_that_cannot_be_read_end_their_request_alone(scene: Scene) -> None:
    await scene.call(lambda engine: (engine.add(sequence("one", logprobs=1)), engine.add(sequence("two"))))
    wrong = item("one", [8])
    wrong.new_logprobs = "no rows"
    scene.core.outputs.put_nowait(step(wrong, item("two", [9])))
    one, two = (await scene.news()).outputs
    assert (one.finish, str(one.error).partition(":")[0]) == ("error", "vLLM's answer cannot be read")
    assert (two.token_ids, two.finish) == ([9], None)
    assert scene.core.sent[-1] == ("abort", ["one"])


@pytest.mark.parametrize("grammar", [None, Grammar("json_object")])
@pytest.mark.parametrize("kind", [ValueError, AssertionError])
async def test_what_vllm_refuses_ends_with_its_reason(grammar: Grammar | None, kind: type[Exception]) -> None:
    def refuse(_: Sequence) -> Any:
        raise kind("no such thing")

    scene = Scene(refuse)
    scene.loop.start()
    try:
        await scene.call(lambda engine: engine.add(sequence("one", grammar=grammar)))
        (out,) = (await scene.news()).outputs
        assert (out.finish, out.error, out.refused) == ("error", "vLLM: no such thing", True)
        assert scene.core.sent == []
        assert scene.engine.check_integrity() == []
    finally:
        await scene.close()


async def test_a_request_that_is_aborted_while_its_grammar_is_checked_never_reaches_vllm() -> None:
    checked, aborted = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slowly(one: Sequence) -> Any:
        loop.call_soon_threadsafe(checked.set)
        asyncio.run_coroutine_threadsafe(aborted.wait(), loop).result(10)
        return one.request_id

    scene = Scene(slowly)
    scene.loop.start()
    try:
        await scene.call(lambda engine: engine.add(sequence("one", grammar=Grammar("json_object"))))
        await asyncio.wait_for(checked.wait(), 60)
        await scene.call(lambda engine: engine.abort("one"))
        aborted.set()
        await asyncio.wait(scene.engine._sending, timeout=60)
        assert [what for what, _ in scene.core.sent] == ["abort"]
    finally:
        await scene.close()


async def test_messages_reach_vllm_in_the_order_of_the_calls(scene: Scene) -> None:
    await scene.call(lambda engine: (engine.add(sequence("one")), engine.abort("one"), engine.add(sequence("two"))))
    await asyncio.sleep(0)
    assert [what for what, _ in scene.core.sent] == ["add", "abort", "add"]


async def test_a_dead_core_ends_the_worker_with_a_reason(scene: Scene) -> None:
    scene.core.outputs.put_nowait(RuntimeError("EngineCore encountered an issue"))
    with pytest.raises(UnavailableError, match="vLLM has ended: EngineCore encountered an issue"):
        await asyncio.wait_for(asyncio.wrap_future(scene.loop.ended), 60)
    with pytest.raises(UnavailableError, match="stopped"):
        await scene.call(lambda engine: engine.load())


async def test_asleep_the_cache_is_empty_until_vllm_has_said_so_itself(scene: Scene) -> None:
    """What vLLM said before it emptied its cache may arrive after it."""
    llm = SimpleNamespace(engine_core=scene.core, vllm_config=None)
    memory = VllmMemory(llm, scene.cache, "", on_cpu=True)
    memory.loop = scene.loop
    messages = Messages(block_size=BLOCK)

    def stored(name: int, start: int) -> bytes:
        return messages.payload(messages.stored([name], None, list(range(start, start + BLOCK))))

    assert isinstance(scene.cache.take(Message(0, stored(1, 0)))[0], Stored)
    assert await memory.sleep(1) == 0
    assert (await scene.news()).events == [Cleared()]
    assert memory.asleep == ("weights", "kv_cache")
    assert scene.cache.take(Message(1, stored(2, 50))) == [], "from before"
    await memory.wake(("weights", "kv_cache"))
    first = messages.payload(messages.cleared(), messages.stored([3], None, list(range(90, 90 + BLOCK))))
    assert [type(event) for event in scene.cache.take(Message(2, first))] == [Cleared, Stored]
    assert scene.cache.blocks.num_shown == 1


async def test_the_steps_that_free_the_last_blocks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    memory = VllmMemory(SimpleNamespace(engine_core=core), VllmCache(BLOCK, 10), "", on_cpu=True)
    core.steps_to_come = 3
    await memory.sleep(1)
    assert core.sent == [("sleep", 1)]
    await memory.wake(("weights", "kv_cache"))
    core.steps_to_come = 1000
    monkeypatch.setattr(vllm_memory, "LAST_STEPS_S", 0.05)
    with pytest.raises(UnavailableError, match=r"still uses KV blocks after 0\.05 s: try again"):
        await memory.sleep(1)
    core.has_ended = True
    with pytest.raises(UnavailableError, match="vLLM: the core has ended"):
        await memory.sleep(1)
    assert memory.asleep == ()


async def test_a_gpu_without_sleep_mode_stays_awake() -> None:
    model = SimpleNamespace(enable_sleep_mode=False)
    llm = SimpleNamespace(engine_core=Core(), vllm_config=SimpleNamespace(model_config=model))
    memory = VllmMemory(llm, VllmCache(BLOCK, 10), "", on_cpu=False)
    with pytest.raises(UnavailableError, match="enable_sleep_mode: true"):
        await memory.sleep(1)
    assert memory.asleep == ()


def test_a_salt_stands_for_a_seed() -> None:
    assert salt_of(1337) is None
    assert seed_of(salt_of(99)) == 99
    assert [seed_of(other) for other in ("baton-", "baton-x", "other", 5, ["baton-1"])] == [None] * 5
