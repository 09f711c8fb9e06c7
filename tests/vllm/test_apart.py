"""Prompts on vLLM prefill workers, answers on vLLM decode workers: KV goes through our transfers, answers are exact."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from baton_proto.generated import inference_pb2 as pb
from router.text.tokenizer import Tokenizer
from runtime.calls.answer import Answer
from runtime.checkpoint.model_files import resolve_model
from tests.service import Service, running_service
from tests.spine import worker_view
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy
from tests.spine.worker_view import inspect, until_gone, until_tree_is_right, until_used
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.test_workers import (
    BLOCK,
    SAMPLED,
    a_grammar_is_kept,
    ask,
    ask_any,
    every_sampling_parameter_is_taken,
    sections,
    text,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

STEP_TOKENS, CHUNK_TOKENS = 128, 32  # so four prompts share a step
LONG = 700  # tokens of a prompt that takes several steps
POOL = "96MiB"  # 68 blocks: three long prompts


@asynccontextmanager
async def apart(python: Path, prefill: int, decode: int, transport: str) -> AsyncIterator[Service]:
    settings: dict[str, Any] = sections(python)
    settings["engine"] |= {"max_batch_tokens": STEP_TOKENS, "kv_memory": POOL}
    settings["vllm"] |= {"long_prefill_token_threshold": CHUNK_TOKENS}
    settings["router"] = {
        "placement": {"local_prefill_tokens": 0},
        "no_worker_timeout_s": 60.0,
    }
    async with running_service("smollm2", prefill, decode, transfer={"transport": transport}, **settings) as service:
        yield service


async def test_prompts_and_answers_on_different_vllm_workers(vllm_python: Path) -> None:
    """One service for all of it, because each engine takes a minute to start."""
    files = resolve_model("smollm2")
    oracle, tokenizer = Oracle(files.folder), Tokenizer(files.folder, files.config.vocab_size)
    async with apart(vllm_python, 1, 2, "shm") as service:
        await every_prompt_is_shipped_and_answered_exactly(service, oracle, "shm")
        await the_first_token_may_be_the_only_one(service, oracle)
        await every_sampling_parameter_is_taken(service, tokenizer)
        await a_grammar_is_kept(service)
        await the_first_layer_leaves_before_the_last_is_computed(service)
        await a_second_question_fetches_only_what_its_worker_has_not(service, oracle)
        await whoever_has_just_answered_falls_asleep(service, oracle)
        await preempted_prompts_are_begun_again(service, oracle)
        names = service.workers("prefill") + service.workers("decode")
        assert not [name for name in names if "Traceback" in service.log(name) or "[error" in service.log(name)]


@pytest.mark.parametrize(("transport", "victim"), [("shm", "the worker"), ("tcp", "its engine")])
async def test_a_killed_worker_of_either_kind_costs_no_token(vllm_python: Path, transport: str, victim: str) -> None:
    """Two of each kind; in the end one of each is left."""
    oracle = Oracle(resolve_model("smollm2").folder)
    async with apart(vllm_python, 2, 2, transport) as service:
        await every_prompt_is_shipped_and_answered_exactly(service, oracle, transport)
        await what_comes_late_after_a_cancel_spoils_nothing(service, oracle)
        await whoever_leaves_in_mid_transfer_spoils_nothing(service, oracle)
        await a_killed_prefill_worker_costs_no_answer(service, oracle, victim)
        await a_decode_worker_killed_in_mid_transfer_costs_no_token(service, oracle, victim)
        await worker_view.until_idle(service, PATIENCE_S)
        await until_tree_is_right(service, PATIENCE_S)


async def test_over_tcp_prompts_and_answers_are_the_same(vllm_python: Path) -> None:
    oracle = Oracle(resolve_model("smollm2").folder)
    async with apart(vllm_python, 1, 1, "tcp") as service:
        await every_prompt_is_shipped_and_answered_exactly(service, oracle, "tcp")
        apart_drawn = await sampled_answers(service)
        await whoever_leaves_in_mid_transfer_spoils_nothing(service, oracle)
        await more_prompts_than_blocks_wait_for_each_other(service, oracle)
        await without_a_prefill_worker_the_decode_worker_runs_the_prompt(service, oracle)
        assert await sampled_answers(service) == apart_drawn, "one vLLM draws what two do"


async def sampled_answers(service: Service) -> list[list[int]]:
    """One by one, of prompts that take one step and of others that take several."""
    prompts = [text(60 + number, 10 + 90 * number) for number in range(4)]
    return [(await ask_any(service, one, max_tokens=16, seed=len(one), **SAMPLED)).token_ids for one in prompts]


async def the_first_token_may_be_the_only_one(service: Service, oracle: Oracle) -> None:
    """The decode worker's vLLM draws it, too, ends with it, and has the prompt in its cache then."""
    prompt = text(40, 2 * BLOCK + 5)
    (first,) = oracle.greedy(prompt, 1)
    only = await ask(service, prompt, 1)
    assert (only.token_ids, only.choices[0].finish_reason) == ([first], "length")
    await worker_view.until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)
    stopped = await ask(service, prompt, 5, stop_token_ids=[first])
    assert (stopped.token_ids, stopped.choices[0].finish_reason) == ([first], "stop")
    assert stopped.usage.cached_tokens == 2 * BLOCK
    await worker_view.until_idle(service, PATIENCE_S)


async def every_prompt_is_shipped_and_answered_exactly(service: Service, oracle: Oracle, transport: str) -> None:
    prompts = [text(number, length) for number, length in enumerate((1, 2, 31, 32, 33, 64, 127, 129, 300))]
    answers = await asyncio.gather(*(ask(service, prompt, 12) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 12) for prompt in prompts]
    shipped = [answer.served_by[0] for answer in answers]
    assert {(one.attempts, one.transport) for one in shipped} == {(1, transport)}
    assert {one.prefill_worker for one in shipped} == {*service.workers("prefill")}
    assert [one.kv_blocks for one in shipped] == [-(-len(prompt) // BLOCK) for prompt in prompts]
    assert all(answer.usage.cached_tokens == 0 for answer in answers)
    await worker_view.until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def the_first_layer_leaves_before_the_last_is_computed(service: Service) -> None:
    """One of several prompts shows it: a worker process that gets no core for a while hears of all layers at once."""
    async with asyncio.timeout(PATIENCE_S):
        number = 0
        while not await leaves_while_it_is_computed(service, number):
            number += 1


async def leaves_while_it_is_computed(service: Service, number: int) -> bool:
    request = greedy(text(1000 + number, CHUNK_TOKENS), 2)
    request.request_id = f"layers-{number}"
    await service.client.generate(request, PATIENCE_S)
    hops = (await service.client.explain(pb.ExplainRequest(request_id=request.request_id), PATIENCE_S)).hops
    (chunk,) = [hop for hop in hops if hop.name == "prefill chunk"]
    (push,) = [hop for hop in hops if hop.name == "KV push"]
    assert (chunk.tokens, push.layers) == (CHUNK_TOKENS, 30)
    return chunk.from_ms < push.from_ms < (chunk.from_ms + chunk.to_ms) / 2


async def a_second_question_fetches_only_what_its_worker_has_not(service: Service, oracle: Oracle) -> None:
    chat = text(100, 5 * BLOCK)
    first = await ask(service, chat, 2 * BLOCK, ignore_eos=True)
    await worker_view.until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)
    longer = [*chat, *first.token_ids, 504, 3575]
    second = await ask(service, longer, 6)
    assert second.served_by[0].decode_worker == first.served_by[0].decode_worker
    assert second.usage.cached_tokens >= 6 * BLOCK, "prompt and answer but for the last block"
    assert second.served_by[0].kv_blocks <= 2
    assert second.token_ids == oracle.greedy(longer, 6)
    await worker_view.until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def what_comes_late_after_a_cancel_spoils_nothing(service: Service, oracle: Oracle) -> None:
    """A prefill worker that stands still is given up; what it sends when it runs again is written nowhere."""
    late = [asyncio.create_task(ask(service, text(700 + number, LONG), 4)) for number in range(4)]
    held = await worker_view.first_running(service, service.workers("prefill"), PATIENCE_S)
    service.kill(held, signal.SIGSTOP)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    prompts = [text(710 + number, LONG) for number in range(3)]
    asked = [asyncio.create_task(ask(service, prompt, 6)) for prompt in prompts]
    await asyncio.wait(asked, timeout=5.0)  # some are asked of the one that stands still
    service.kill(held, signal.SIGCONT)
    answers = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 6) for prompt in prompts]
    await worker_view.until_idle(service, PATIENCE_S)
    await until_used(service, PATIENCE_S)


async def whoever_leaves_in_mid_transfer_spoils_nothing(service: Service, oracle: Oracle) -> None:
    """Blocks of a broken transfer are used again, and hold what the next one brought; its own are in no cache."""
    left = [text(200 + number, LONG) for number in range(4)]
    asked = [asyncio.create_task(ask(service, prompt, 4)) for prompt in left]
    await worker_view.first_running(service, service.workers("prefill"), PATIENCE_S)
    for task in asked:
        task.cancel()
    prompts = [text(210, LONG), left[0]]
    answers = await asyncio.gather(*(ask(service, prompt, 8) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 8) for prompt in prompts]
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await ask(service, text(220, LONG), 300, timeout_s=0.5, ignore_eos=True)
    await worker_view.until_idle(service, PATIENCE_S)
    await asyncio.gather(*asked, return_exceptions=True)


async def more_prompts_than_blocks_wait_for_each_other(service: Service, oracle: Oracle) -> None:
    """The decode workers preempt some, which they then compute themselves."""
    prompts = [text(300 + number, 150 + 40 * number) for number in range(8)]
    answers = await asyncio.gather(*(ask(service, prompt, 40, ignore_eos=True) for prompt in prompts))
    expected = [oracle.greedy(prompt, 40, ignore_eos=True) for prompt in prompts]
    assert [answer.token_ids for answer in answers] == expected
    await worker_view.until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def whoever_has_just_answered_falls_asleep(service: Service, oracle: Oracle) -> None:
    """Though the steps of vLLM's that free the last blocks are still to come: it falls asleep only when no request has
    blocks."""
    slept = set()
    for number, _ in enumerate(service.workers("decode")):  # a sleeper leaves the next answer to another one
        answer = await ask(service, text(340 + number, 100), 1)
        for name in (answer.served_by[0].decode_worker, "prefill-1"):
            assert (await service.client.sleep(name)).state == "sleeping"
        assert (await service.client.wake("prefill-1")).state == "ready"
        slept.add(answer.served_by[0].decode_worker)
    assert slept == {*service.workers("decode")}
    for name in slept:
        assert (await service.client.wake(name)).state == "ready"
    await until_used(service, PATIENCE_S)
    prompts = [text(350 + number, 100) for number in range(4)]
    answers = await asyncio.gather(*(ask(service, prompt, 4) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 4) for prompt in prompts]
    assert {(answer.served_by[0].attempts, answer.served_by[0].transport) for answer in answers} == {(1, "shm")}
    await worker_view.until_idle(service, PATIENCE_S)


async def a_killed_prefill_worker_costs_no_answer(service: Service, oracle: Oracle, victim: str) -> None:
    prompts = [text(400 + number, LONG) for number in range(3)]
    asked = [asyncio.create_task(ask(service, prompt, 6)) for prompt in prompts]
    await worker_view.until_running(service, "prefill-1", PATIENCE_S)
    kill(service, "prefill-1", victim)
    answers = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 6) for prompt in prompts]
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    assert {answer.served_by[0].prefill_worker for answer in answers} == {"prefill-2"}
    await until_gone(service, "prefill-1", PATIENCE_S)
    await worker_view.until_idle(service, PATIENCE_S)


async def a_decode_worker_killed_in_mid_transfer_costs_no_token(service: Service, oracle: Oracle, victim: str) -> None:
    """Some answers have begun, of others the KV is on its way."""
    begun: set[int] = set()
    short, long = [text(500 + number, 60) for number in range(4)], [text(510 + number, LONG) for number in range(2)]

    async def stream(number: int) -> Answer:
        request = greedy(short[number], 100, ignore_eos=True)
        return await service.client.generate(request, PATIENCE_S, lambda _: begun.add(number))

    streams = [asyncio.create_task(stream(number)) for number in range(len(short))]
    async with asyncio.timeout(PATIENCE_S):
        while len(begun) < len(short):
            await asyncio.sleep(worker_view.POLL_S)
        asked = [asyncio.create_task(ask(service, prompt, 6)) for prompt in long]
        while not (lost := [one for one in service.workers("decode") if (await inspect(service, one)).load.leases]):
            await asyncio.sleep(worker_view.POLL_S)
    kill(service, lost[0], victim)
    answers = await asyncio.gather(*streams)
    assert [answer.token_ids for answer in answers] == [oracle.greedy(one, 100, ignore_eos=True) for one in short]
    answers += await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers[len(short) :]] == [oracle.greedy(prompt, 6) for prompt in long]
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    await until_gone(service, lost[0], PATIENCE_S)


def kill(service: Service, worker_id: str, victim: str) -> None:
    """The worker's process, or that of vLLM's engine behind it."""
    if victim == "the worker":
        service.kill(worker_id)
    else:
        children = psutil.Process(service.pid(worker_id)).children()
        next(one for one in children if "EngineCore" in one.name()).kill()


async def preempted_prompts_are_begun_again(service: Service, oracle: Oracle) -> None:
    """Two decode workers grant more blocks than the one prefill worker has."""
    prompts = [text(450 + number, LONG) for number in range(6)]
    answers = await asyncio.gather(*(ask(service, prompt, 4) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 4) for prompt in prompts]
    assert "vLLM preempted the prompt before its KV was sent" in service.log("decode-1") + service.log("decode-2")
    await worker_view.until_idle(service, PATIENCE_S)


async def without_a_prefill_worker_the_decode_worker_runs_the_prompt(service: Service, oracle: Oracle) -> None:
    """Its KV has not come: vLLM is told so, and computes the prompt as a new request."""
    prompt = text(600, LONG)
    asked = asyncio.create_task(ask(service, prompt, 6))
    await worker_view.until_running(service, "prefill-1", PATIENCE_S)
    service.kill("prefill-1")
    answer = await asked
    assert answer.token_ids == oracle.greedy(prompt, 6)
    assert answer.served_by[0].prefill_worker == ""
    assert (await inspect(service, "decode-1")).load.leases == 0
    await worker_view.until_idle(service, PATIENCE_S)
