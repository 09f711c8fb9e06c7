"""A whole service whose decode workers compute with a real vLLM: the same exact answers, found prefixes, and no token
lost when one of its processes is killed."""

import asyncio
import json
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
from tests.spine import prompts as spine_prompts
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy
from tests.spine.worker_view import first_running, inspect, until_gone, until_idle, until_tree_is_right, until_used
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.mid_stream import killed_in_mid_stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

BLOCK = 32
CHAT_BLOCKS = 20
STEP_TOKENS = 256
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
PENALIZED = {"presence_penalty": 0.5, "frequency_penalty": 0.5}


def sections(python: Path) -> dict[str, Any]:
    return {
        "workers": {"engine": "vllm", "python": str(python), "ready_timeout_s": START_S},
        "engine": {"block_size": BLOCK, "kv_memory": "256MiB", "max_model_len": 1024, "cache_salt": "a test's own"},
        "vllm": {"seed": 1},
    }


def text(number: int, length: int) -> list[int]:
    """Token ids of ordinary words, other ones for each number."""
    return [2000 + (number * 977 + at * at * 31) % 20_000 for at in range(length)]


async def ask(service: Service, prompt: list[int], max_tokens: int, **options: Any) -> Answer:
    return await spine_prompts.ask(service.client, prompt, max_tokens, **{"timeout_s": PATIENCE_S} | options)


async def test_a_service_of_vllm_workers(vllm_python: Path) -> None:
    """One service for all of it, because each engine takes a minute to start."""
    files = resolve_model("smollm2")
    oracle, tokenizer = Oracle(files.folder), Tokenizer(files.folder, files.config.vocab_size)
    settings = sections(vllm_python)
    settings["engine"]["max_batch_tokens"] = STEP_TOKENS
    async with running_service("smollm2", 0, 2, **settings) as service:
        await answers_are_those_of_transformers(service, oracle)
        await a_second_question_finds_the_first_ones_blocks(service)
        await every_sampling_parameter_is_taken(service, tokenizer)
        await a_seed_draws_the_same_however_many_steps_the_prompt_takes(service)
        await a_grammar_is_kept(service)
        await whoever_leaves_frees_the_engine(service)
        await a_sleeper_forgets_and_serves_again(service, oracle)
        await the_load_and_the_steps_are_told(service)
        await a_killed_process_costs_no_token(service, oracle)
    logs = "".join(service.log(f"decode-{number}") for number in (1, 2, 3))
    assert "on_step failed" not in logs
    assert "blocks that routers will not find" not in logs


async def answers_are_those_of_transformers(service: Service, oracle: Oracle) -> None:
    """Also those of many at once, which share steps."""
    prompts = [text(number, length) for number, length in enumerate((1, 2, 31, 32, 33, 64, 100, 257))]
    answers = await asyncio.gather(*(ask(service, prompt, 12) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 12) for prompt in prompts]
    assert {answer.served_by[0].decode_worker for answer in answers} == {"decode-1", "decode-2"}
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def a_second_question_finds_the_first_ones_blocks(service: Service) -> None:
    """Prompts are long, so that computing one again costs more than any noise of two cores."""
    chats = [text(100 + number, CHAT_BLOCKS * BLOCK) for number in range(4)]
    first = [await ask(service, chat, 2 * BLOCK, ignore_eos=True) for chat in chats]
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)
    for chat, before in zip(chats, first, strict=True):
        answer = await ask(service, [*chat, *before.token_ids, 504, 3575], 2)
        assert answer.served_by[0].decode_worker == before.served_by[0].decode_worker
        assert answer.usage.cached_tokens >= (CHAT_BLOCKS + 1) * BLOCK, "prompt and answer but for the last block"
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)
    for worker in await service.client.diff(pb.DiffRequest(), 10):
        assert (worker.missing, worker.extra, worker.changed) == (0, 0, 0), worker
        assert worker.worker_blocks > 0


async def every_sampling_parameter_is_taken(service: Service, tokenizer: Tokenizer) -> None:
    prompt = text(7, 20)
    twice = [await ask_any(service, prompt, max_tokens=12, seed=5, **SAMPLED) for _ in range(2)]
    assert twice[0].token_ids == twice[1].token_ids, "the seed decides"
    await ask_any(service, prompt, max_tokens=8, temperature=0.0, **PENALIZED)
    plain = await ask(service, prompt, 8, ignore_eos=True)
    banned = await ask(service, prompt, 8, ignore_eos=True, logit_bias={plain.token_ids[0]: -100.0})
    assert banned.token_ids[0] != plain.token_ids[0]
    stopped = await ask(service, prompt, 8, stop_token_ids=[plain.token_ids[2]])
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(plain.token_ids[2]) + 1]
    assert stopped.choices[0].finish_reason == "stop"
    longer = await ask(service, prompt, 8, stop_token_ids=[plain.token_ids[2]], min_tokens=6)
    assert len(longer.token_ids) >= 6
    told = await ask(service, prompt, 4, logprobs=3, ignore_eos=True)
    assert [len(token.top) for token in told.choices[0].logprobs] == [3] * 4
    assert all(token.top[0].logprob == pytest.approx(token.logprob) for token in told.choices[0].logprobs)
    scored = await ask(service, prompt, 4, prompt_logprobs=2, ignore_eos=True)
    assert scored.token_ids == plain.token_ids[:4]
    assert [one.token_id for one in scored.prompt_logprobs] == prompt[1:]
    assert all(len(one.top) == 2 and one.top[0].logprob >= one.logprob for one in scored.prompt_logprobs)
    assert scored.usage.cached_tokens == 0
    many = await ask(service, prompt, 4, n=2)
    assert len(many.choices) == 2
    word = tokenizer.decode([plain.token_ids[3]])
    assert word not in (await ask(service, prompt, 8, ignore_eos=True, bad_words=[word])).choices[0].text
    two = plain.token_ids[:2]
    assert {*(await ask(service, prompt, 8, ignore_eos=True, allowed_token_ids=two)).token_ids} <= {*two}
    cut = await ask(service, prompt, 8, ignore_eos=True, stop=[word])
    assert word not in cut.choices[0].text


async def a_seed_draws_the_same_however_many_steps_the_prompt_takes(service: Service) -> None:
    """Several when nothing is cached, one when all but the last block is."""
    prompt = text(8, 3 * STEP_TOKENS + 5)
    answers = [await ask_any(service, prompt, max_tokens=12, seed=5, **SAMPLED) for _ in range(2)]
    assert [answer.usage.cached_tokens for answer in answers] == [0, 3 * STEP_TOKENS]
    assert answers[0].token_ids == answers[1].token_ids
    other = await ask_any(service, prompt, max_tokens=12, seed=6, **SAMPLED)
    assert other.token_ids != answers[0].token_ids


async def ask_any(service: Service, prompt: list[int], **options: Any) -> Answer:
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=pb.SamplingOptions(**options))
    return await service.client.generate(request, PATIENCE_S)


async def a_grammar_is_kept(service: Service) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for grammar, fits in (
        (pb.Grammar(json_schema=json.dumps(schema)), lambda said: json.loads(said)["a"] in (1, 2)),
        (pb.Grammar(regex="[ab]{3}"), lambda said: len(said) == 3 and set(said) <= {"a", "b"}),
        (pb.Grammar(choice=pb.Alternatives(texts=["yes", "no"])), lambda said: said in ("yes", "no")),
    ):
        answer = await ask(service, text(9, 10), 120, grammar=grammar)
        assert fits(answer.choices[0].text), answer.choices[0].text


async def whoever_leaves_frees_the_engine(service: Service) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
        await ask(service, text(11, 50), 900, timeout_s=1.0, ignore_eos=True)
    await until_idle(service, PATIENCE_S)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(service, text(11, 50), 2000)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def a_sleeper_forgets_and_serves_again(service: Service, oracle: Oracle) -> None:
    prompt = text(13, 3 * BLOCK)
    await asyncio.gather(*(ask(service, [*prompt, number], 1) for number in range(8)))
    slept = await service.client.sleep("decode-1")
    assert (slept.state, list(slept.asleep)) == ("sleeping", ["weights", "kv_cache"])
    await until_tree_is_right(service, PATIENCE_S)
    shown = {one.worker_id: one for one in (await service.client.status(60)).workers}
    assert shown["decode-1"].blocks_in_tree == 0
    answer = await ask(service, prompt, 4)
    assert answer.served_by[0].decode_worker == "decode-2"
    assert (await service.client.wake("decode-1")).state == "ready"
    await until_used(service, PATIENCE_S)
    await service.client.sleep("decode-2")
    again = await ask(service, prompt, 4)
    assert again.served_by[0].decode_worker == "decode-1"
    assert again.usage.cached_tokens == 0
    assert again.token_ids == answer.token_ids == oracle.greedy(prompt, 4)
    await service.client.wake("decode-2")
    await until_used(service, PATIENCE_S)
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)


async def the_load_and_the_steps_are_told(service: Service) -> None:
    answering = asyncio.create_task(ask(service, text(17, 3 * BLOCK), 200, ignore_eos=True))
    worker_id = await first_running(service, service.workers("decode"), PATIENCE_S)
    load = (await inspect(service, worker_id)).load
    assert load.running == 1
    assert load.blocks_used >= 3
    assert load.blocks_total > 100
    assert load.steps > 0
    assert load.step_ms > 0
    await answering


async def a_killed_process_costs_no_token(service: Service, oracle: Oracle) -> None:
    """First a worker itself, then the engine behind another one."""
    workers = {name: psutil.Process(service.pid(name)) for name in service.workers("decode")}
    await goes_on_elsewhere(service, oracle, workers)
    await service.start_worker("decode")
    await until_used(service, PATIENCE_S)
    workers = {name: psutil.Process(service.pid(name)) for name in service.workers("decode")}
    cores = {
        name: next(child for child in worker.children() if "EngineCore" in child.name())
        for name, worker in workers.items()
    }
    await goes_on_elsewhere(service, oracle, cores)


async def goes_on_elsewhere(service: Service, oracle: Oracle, processes: dict[str, psutil.Process]) -> None:
    prompts = [text(200 + number, 40) for number in range(6)]
    penalized = [greedy(text(210 + number, 40), 60, ignore_eos=True, **PENALIZED) for number in range(2)]
    undisturbed = [(await service.client.generate(one, PATIENCE_S)).token_ids for one in penalized]
    requests = [greedy(prompt, 60, ignore_eos=True) for prompt in prompts] + penalized
    kills = {name: process.kill for name, process in processes.items()}
    lost, answers = await killed_in_mid_stream(service, requests, kills)
    expected = [oracle.greedy(prompt, 60, ignore_eos=True) for prompt in prompts] + undisturbed
    assert [answer.token_ids for answer in answers] == expected
    await until_gone(service, lost, PATIENCE_S)
    await until_idle(service, PATIENCE_S)
    await until_tree_is_right(service, PATIENCE_S)
