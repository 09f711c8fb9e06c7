"""An engine that shares KV, told by a script in vLLM's place what vLLM says over the real socket."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton_proto.sampling import SamplingParams, TokenLogprobs
from engine.sequences.batch import Batch
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.vllm.cache import VllmCache
from engine.vllm.kv.engine import NO_TOKEN, SharingEngine
from engine.vllm.kv.link import VllmEnd, WorkerEnd
from engine.vllm.kv.messages import (
    Arrived,
    CacheMemory,
    Chunk,
    FromVllm,
    LayerComputed,
    Refused,
    Reserved,
    Sent,
    StepBegins,
)
from runtime.errors import UnavailableError
from tests.engine.vllm.test_engine import Core, item, step

BLOCK = 4
PROMPT = list(range(10))


class Scene:
    def __init__(self, folder: Path) -> None:
        link = WorkerEnd(folder / "kv")
        self.vllm = VllmEnd(str(folder / "kv"))
        with open(os.devnull) as file:
            self.vllm.introduce(CacheMemory(2, 10, 1, BLOCK, 8, "float32", "form"), file.fileno())
        memory, fd = link.accept(5)
        os.close(fd)
        assert memory.form == "form"
        self.core = Core()
        llm: Any = SimpleNamespace(engine_core=self.core)
        self.engine = SharingEngine(llm, VllmCache(BLOCK, 10), frozenset({2}), link)
        self.engine._request = self._request  # type: ignore[method-assign]
        self.layers: list[int] = []
        self.batches: list[list[tuple[str, int, list[int]]]] = []
        self.engine.on_batch = self._batch

    def _request(self, one: Sequence) -> tuple[str, Any]:
        return self.engine._name(one.request_id), self.engine._transfer(one)

    async def news(self, *outputs: Any) -> list[SequenceOutput]:
        """Of one step of vLLM's."""
        self.core.outputs.put_nowait(step(*outputs))
        return (await self.engine.next_step()).outputs

    def fetched(self, one: Sequence) -> None:
        """Reserves it, so that its KV may arrive."""
        self.engine.reserve(one)
        self.say(Reserved(one.request_id, [7, 3, 5], 4))

    def _batch(self, batch: Batch) -> Any:
        self.batches.append([(one.sequence.request_id, one.end, [*one.sequence.block_table]) for one in batch.items])
        return self.layers.append

    def say(self, *messages: FromVllm) -> StepOutput:
        for message in messages:
            self.vllm.send(message)
        output = self.engine.take_kv_news()
        assert output is not None
        return output


@pytest.fixture
async def scene(tmp_path: Path) -> Any:
    scene = Scene(tmp_path)
    yield scene
    scene.engine.link.close()
    scene.vllm.close()


def sequence(name: str, *, sent: bool = False, max_tokens: int = 9, **sampling: Any) -> Sequence:
    wanted = SamplingParams(max_tokens=max_tokens, **sampling)
    return Sequence(name, [*PROMPT], len(PROMPT), wanted, prefill_only=sent, pinned=sent)


async def test_a_fetching_request_gets_its_blocks_waits_for_its_kv_and_decodes(scene: Scene) -> None:
    one = sequence("one")
    assert not scene.engine.reserve(one)
    assert not scene.engine.reserve(one)
    await asyncio.sleep(0)
    assert scene.core.sent == [("add", ("one", {"extra_args": {"kv_transfer_params": {"baton": "fetch"}}}))], "once"
    assert scene.engine.load().queued_prefill_tokens == 0, "its prompt is computed elsewhere"
    scene.say(Reserved("one", [7, 3, 5], 4))
    assert scene.engine.reserve(one)
    assert (one.status, one.block_table, one.num_computed_tokens) == (SequenceStatus.REMOTE, [7, 3, 5], 4)
    assert scene.engine.load().blocks_used == 3, "though vLLM has made no step"
    assert scene.engine.admit(one, NO_TOKEN, None) is None
    assert scene.vllm.news() == [Arrived("one")]
    (out,) = await scene.news(item("one", [8]))
    assert (out.token_ids, one.num_cached_tokens) == ([8], 4), "what came from another worker was not cached here"


async def test_an_answer_begins_with_the_prefill_workers_token_which_vllm_draws_again_for_itself(scene: Scene) -> None:
    one, logprobs = sequence("one"), TokenLogprobs(-0.5, [])
    scene.fetched(one)
    first = scene.engine.admit(one, 8, logprobs)
    assert first is not None
    assert (first.token_ids, first.logprobs, first.finish) == ([8], [logprobs], None)
    assert scene.vllm.news() == [Arrived("one")]
    assert not await scene.news(item("one", [8])), "the client has it"
    (second,) = await scene.news(item("one", [4]))
    assert (second.token_ids, one.token_ids) == ([4], [*PROMPT, 8, 4])
    assert scene.engine.check_integrity() == []


@pytest.mark.parametrize("finish", [None, "stop"])
async def test_where_vllm_draws_another_first_token_the_answer_goes_on_from_the_clients(
    scene: Scene, finish: str | None
) -> None:
    one = sequence("one")
    scene.fetched(one)
    scene.engine.admit(one, 8, None)
    assert not await scene.news(item("one", [9], finish))
    await asyncio.sleep(0)
    assert scene.core.sent[1:] == [("abort", ["one"]), ("add", ("one+", {}))], "as a request of its own"
    assert scene.engine.check_integrity() == []
    assert not await scene.news(item("one", [5])), "a step that was under way"
    (out,) = await scene.news(item("one+", [4]))
    assert (out.token_ids, one.token_ids) == ([4], [*PROMPT, 8, 4])
    scene.engine.abort("one")
    await asyncio.sleep(0)
    assert scene.core.sent[-1] == ("abort", ["one+"])
    assert not await scene.news(item("one+", [6]))


@pytest.mark.parametrize(
    ("token", "max_tokens", "finish", "drawn"),
    [(2, 9, "stop", item("one", [2], "stop")), (8, 1, "length", item("one", [8], "length"))],
    ids=["a stop token", "the only one"],
)
async def test_a_first_token_that_ends_the_answer_ends_it_and_vllm_ends_it_for_itself(
    scene: Scene, token: int, max_tokens: int, finish: str, drawn: Any
) -> None:
    one = sequence("one", max_tokens=max_tokens)
    scene.fetched(one)
    out = scene.engine.admit(one, token, None)
    assert out is not None
    assert (out.finish, out.stop_token) == (finish, token if finish == "stop" else None)
    assert scene.engine.load().running + scene.engine.load().waiting == 1, "vLLM has it"
    assert not await scene.news(drawn)
    await asyncio.sleep(0)
    assert [what for what, _ in scene.core.sent] == ["add"]
    assert scene.engine.load().running + scene.engine.load().waiting == 0


async def test_an_ended_answer_that_vllm_would_go_on_with_is_aborted(scene: Scene) -> None:
    one = sequence("one")
    scene.fetched(one)
    scene.engine.admit(one, 2, None)
    assert not await scene.news(item("one", [9]))
    await asyncio.sleep(0)
    assert scene.core.sent[-1] == ("abort", ["one"])
    assert scene.engine.load().waiting == 0


async def test_a_first_token_whose_turn_could_not_be_repaired_is_vllms_own(scene: Scene) -> None:
    one = sequence("one", presence_penalty=0.5)
    scene.fetched(one)
    assert scene.engine.admit(one, 8, None) is None
    (out,) = await scene.news(item("one", [9]))
    assert out.token_ids == [9]


@pytest.mark.parametrize(("penalty", "token"), [(0.0, 8), (0.5, NO_TOKEN)])
async def test_a_prompts_end_brings_the_token_that_the_answer_may_begin_with(
    scene: Scene, penalty: float, token: int
) -> None:
    one = sequence("one", sent=True, frequency_penalty=penalty)
    scene.engine.add(one)
    scene.say(StepBegins([Chunk("one", 0, 10, [6, 2, 9])]), LayerComputed(0), LayerComputed(1, ends=True))
    (end,) = await scene.news(item("one", [8], "stop"))
    assert (end.token_ids, end.finish) == ([token], "prefill")


async def test_blocks_whose_kv_does_not_come_are_refused_and_only_those_behind_the_prefix(scene: Scene) -> None:
    one = sequence("one")
    scene.engine.reserve(one)
    scene.say(Reserved("one", [7, 3, 5], 4))
    scene.engine.release(one)
    assert scene.vllm.news() == [Refused("one", [3, 5])]
    scene.core.outputs.put_nowait(step(item("one", [], "error")))
    assert not (await scene.engine.next_step()).outputs, "the request has ended already"


@pytest.mark.parametrize("blocks", [[7, 3, 3], [7, 0, 5], [7, 3, 11]])
async def test_blocks_that_nobody_may_write_end_their_request_alone(scene: Scene, blocks: list[int]) -> None:
    """As with a sliding window, where one block stands in for all that have left it."""
    one, other = sequence("one"), sequence("other")
    scene.engine.reserve(one)
    scene.engine.reserve(other)
    (end,) = scene.say(Reserved("one", blocks, 4)).outputs
    assert (end.sequence, end.finish, end.refused) == (one, "error", False)
    assert scene.vllm.news() == [Refused("one", blocks[1:])]
    scene.engine.forgo(one)  # the role ends the request, too
    scene.say(Reserved("other", [7, 3, 5], 4))
    assert (scene.engine.reserve(other), scene.engine.check_integrity()) == (True, [])


async def test_a_request_that_was_given_up_before_it_had_blocks_returns_them_when_they_come(scene: Scene) -> None:
    one = sequence("one")
    scene.engine.reserve(one)
    scene.engine.forgo(one)
    await asyncio.sleep(0)
    assert scene.core.sent[-1] == ("abort", ["one"])
    scene.say(Reserved("one", [7, 3, 5], 8))
    assert scene.vllm.news() == [Refused("one", [5])]


async def test_the_layers_of_a_step_reach_the_batch_and_the_last_chunk_ends_the_prompt(scene: Scene) -> None:
    one = sequence("one", sent=True)
    scene.engine.add(one)
    assert not scene.say(StepBegins([Chunk("one", 4, 7, [6, 2])])).outputs
    assert not scene.say(LayerComputed(0), LayerComputed(1, ends=True)).outputs
    first_layer = scene.say(StepBegins([Chunk("one", 7, 10, [9])]), LayerComputed(0))
    assert (first_layer.outputs, scene.layers) == ([], [0, 1, 0]), "a layer leaves before the next is computed"
    scene.core.outputs.put_nowait(step(item("one", [8], "length")))
    assert not (await scene.engine.next_step()).outputs, "vLLM's own end may overtake the last layers"
    assert scene.engine.check_integrity() == []
    (end,) = scene.say(LayerComputed(1, ends=True)).outputs
    assert (end.finish, end.token_ids, one.num_cached_tokens) == ("prefill", [8], 4)
    assert scene.engine.counts().prompt_tokens == 6
    assert scene.batches == [[("one", 7, [6, 2])], [("one", 10, [6, 2, 9])]]
    assert scene.vllm.news() == []
    scene.engine.unpin(one)
    assert scene.vllm.news() == [Sent("one")]


async def test_a_computed_prompt_ends_when_vllm_keeps_its_blocks_and_not_before(scene: Scene) -> None:
    one = sequence("one", sent=True)
    scene.engine.add(one)
    computed = scene.say(StepBegins([Chunk("one", 0, 10, [6, 2, 9])]), LayerComputed(0), LayerComputed(1, ends=True))
    assert not computed.outputs, "vLLM may still give its blocks to another one"
    scene.core.outputs.put_nowait(step(item("one", [8], "length")))
    (end,) = (await scene.engine.next_step()).outputs
    assert end.finish == "prefill"
    assert not scene.say(StepBegins([], ["one"])).outputs, "it has ended"


async def test_a_prompt_that_is_preempted_between_its_last_layer_and_its_end_is_not_committed(scene: Scene) -> None:
    one = sequence("one", sent=True)
    scene.engine.add(one)
    scene.say(StepBegins([Chunk("one", 0, 10, [6, 2, 9])]), LayerComputed(0), LayerComputed(1, ends=True))
    (end,) = scene.say(StepBegins([], ["one"])).outputs
    assert (end.finish, end.error) == ("error", "vLLM preempted the prompt before its KV was sent")
    scene.core.outputs.put_nowait(step(item("one", [8], "length")))
    assert not (await scene.engine.next_step()).outputs
    assert scene.engine.check_integrity() == []


async def test_a_preempted_prompt_ends_with_an_error_and_nothing_of_it_is_computed_again(scene: Scene) -> None:
    one = sequence("one", sent=True)
    scene.engine.add(one)
    scene.say(StepBegins([Chunk("one", 0, 7, [6, 2])]), LayerComputed(0), LayerComputed(1, ends=True))
    (end,) = scene.say(StepBegins([], ["one"])).outputs
    assert (end.finish, end.error) == ("error", "vLLM preempted the prompt before its KV was sent")
    await asyncio.sleep(0)
    assert scene.core.sent[-1] == ("abort", ["one"])
    scene.engine.unpin(one)
    assert scene.vllm.news() == [Sent("one")]


async def test_blocks_count_until_the_last_reader_has_gone(scene: Scene) -> None:
    one = sequence("one", sent=True)
    scene.engine.add(one)
    scene.say(StepBegins([Chunk("one", 0, 10, [6, 2, 9])]), LayerComputed(0), LayerComputed(1, ends=True))
    scene.core.outputs.put_nowait(step(item("one", [8], "length")))
    (end,) = (await scene.engine.next_step()).outputs
    assert (end.finish, scene.engine.load().blocks_used) == ("prefill", 3)
    scene.engine.unpin(one)
    assert (scene.engine.load().blocks_used, scene.engine.check_integrity()) == (0, [])


async def test_books_that_are_wrong_are_told(scene: Scene) -> None:
    """An account for each way in which blocks would be lost, or read when they are another's."""
    fetched, sent = sequence("fetched"), sequence("sent", sent=True)
    scene.engine.reserve(fetched)
    scene.engine.add(sent)
    scene.say(Reserved("fetched", [7, 3, 5], 4))
    assert scene.engine.check_integrity() == []
    scene.engine._fetching = {"stranger"}
    del scene.engine._with_vllm["sent"]
    scene.engine._half_ended["fetched"] = None
    assert scene.engine.check_integrity() == [
        "stranger is to get its KV without being registered",
        "fetched has blocks for its KV, which nobody brings",
        "sent sends its KV from blocks that vLLM does not keep",
        "fetched has ended by half, and sends no KV",
    ]
    scene.engine._fetching = {"fetched"}


async def test_a_prompt_that_vllm_refused_keeps_no_blocks(scene: Scene) -> None:
    def refuse(_: Sequence) -> Any:
        raise ValueError("too long")

    scene.engine._request = refuse  # type: ignore[method-assign]
    one = sequence("one", sent=True)
    scene.engine.add(one)
    assert [end.error for end in scene.engine.take_dead_ends()] == ["vLLM: too long"]
    scene.engine.unpin(one)
    assert scene.vllm.news() == []


async def test_the_end_of_vllms_process_is_noticed(scene: Scene) -> None:
    scene.vllm.close()
    with pytest.raises(UnavailableError, match="has ended"):
        scene.engine.take_kv_news()
    with pytest.raises(UnavailableError, match="takes no news"):
        scene.engine.link.send(Sent("one"))


def test_a_process_that_does_not_share_its_cache_is_an_error(tmp_path: Path) -> None:
    link = WorkerEnd(tmp_path / "kv")
    with pytest.raises(UnavailableError, match="did not share"):
        link.accept(0.01)
