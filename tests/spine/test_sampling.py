"""Sampling through a whole service: the same seed gives the same text wherever and beside whatever it runs, and every
option does what OpenAI's and vLLM's users expect. Noise is from our own generator, so that what transformers can judge
here is log-probabilities and greedy choices.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from baton_proto.generated import inference_pb2 as pb
from router.text.tokenizer import Tokenizer
from runtime.calls.answer import Answer
from tests.service import Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE, write_tiny_model

SHIP_SOME = {"router": {"placement": {"local_prefill_tokens": 16}}}
EOS = EOS_TOKEN_IDS[0]
LONG = 2000  # so that a worker dies in the middle of it
TRUNCATED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01}
PENALIZED = {"temperature": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model, VOCAB_SIZE)


@pytest.fixture
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, 1, 2, SHIP_SOME) as service:
        yield service


async def test_sampling(service: Service, oracle: Oracle, tokenizer: Tokenizer) -> None:
    """One service for all of it."""
    await logprobs_are_those_of_the_raw_distribution(service, oracle)
    await penalties_and_bias_are_openais(service, oracle)
    await ends_of_sequence(service)
    await stop_strings_reach_across_tokens(service, oracle, tokenizer)
    await text_is_what_the_tokens_decode_to(service, tokenizer)
    await choices_are_seeds_one_after_the_other(service)
    await seeds_decide_alone(service)
    await until_idle(service)


@pytest.mark.parametrize(("setting", "different"), [("auto", 1), ("none", 3)])
async def test_the_models_file_says_how_to_sample_unless_it_is_left_out(
    tmp_path: Path, setting: str, different: int
) -> None:
    (write_tiny_model(tmp_path) / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    async with running_service(tmp_path, 0, 1, {"router": {"generation_config": setting}}) as service:
        prompt = random_prompt(20, 1)
        answers = [await ask(service, prompt, 24, seed=seed, ignore_eos=True) for seed in range(3)]
        assert len({tuple(answer.token_ids) for answer in answers}) == different


async def ask(service: Service, tokens: list[int], max_tokens: int, **options: object) -> Answer:
    sampling = pb.SamplingOptions(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    return await service.client.generate(pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), sampling=sampling), 60)


async def logprobs_are_those_of_the_raw_distribution(service: Service, oracle: Oracle) -> None:
    """Whatever bias, penalties and temperature did to the choice; the first token comes from the prefill worker."""
    prompt = random_prompt(50, seed=1)
    answer = await ask(service, prompt, 12, logprobs=5, seed=3, ignore_eos=True, logit_bias={7: 4.0}, **PENALIZED)
    assert answer.served_by[0].prefill_worker == "prefill-1"
    expected = oracle.logits(prompt + answer.token_ids).log_softmax(-1)[len(prompt) - 1 :]
    assert len(answer.choices[0].logprobs) == 12
    for token_id, logprob, row in zip(answer.token_ids, answer.choices[0].logprobs, expected, strict=False):
        best = row.topk(5)
        assert logprob.token_id == token_id
        assert logprob.logprob == pytest.approx(row[token_id].item(), abs=1e-3)
        assert [top.token_id for top in logprob.top] == best.indices.tolist()
        assert [top.logprob for top in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-3)


async def penalties_and_bias_are_openais(service: Service, oracle: Oracle) -> None:
    prompt, bias = random_prompt(40, seed=2), {9: 3.5, 11: -100.0}
    output: list[int] = []
    for _ in range(24):
        scores = oracle.logits(prompt + output)[-1].clone()
        for token_id, value in bias.items():
            scores[token_id] += value
        for token_id in {*prompt, *output}:
            scores[token_id] = scores[token_id] / 1.4 if scores[token_id] > 0 else scores[token_id] * 1.4
        for token_id, count in Counter(output).items():
            scores[token_id] -= 0.75 * count + 0.5
        output.append(int(scores.argmax()))
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.75, "presence_penalty": 0.5}
    answer = await ask(service, prompt, 24, temperature=0, ignore_eos=True, logit_bias=bias, **penalties)
    assert answer.token_ids == output
    assert output != oracle.greedy(prompt, 24, ignore_eos=True), "the options made no difference"


async def ends_of_sequence(service: Service) -> None:
    """For a prompt that is shipped, whose first token a prefill worker samples, and for one that is not."""
    for prompt in (random_prompt(40, seed=3), random_prompt(5, seed=3)):
        for end in EOS_TOKEN_IDS:
            forced = await ask(service, prompt, 9, logit_bias={end: 100.0})
            assert (forced.token_ids, forced.text) == ([end], "")
            assert (forced.choices[0].finish_reason, forced.usage.completion_tokens) == ("stop", 1)
        late = await ask(service, prompt, 9, logit_bias={EOS: 100.0}, min_tokens=4)
        assert len(late.token_ids) == 5
        assert late.token_ids[4] == EOS
        assert not set(late.token_ids[:4]) & set(EOS_TOKEN_IDS)
        never = await ask(service, prompt, 9, logit_bias={EOS: 100.0}, ignore_eos=True)
        assert (never.token_ids, never.text, never.choices[0].finish_reason) == ([EOS] * 9, "", "length")
        stop_id = await ask(service, prompt, 9, logit_bias={70: 100.0}, stop_token_ids=[70], min_tokens=2)
        assert (len(stop_id.token_ids), stop_id.token_ids[-1]) == (3, 70)
        assert stop_id.choices[0].finish_reason == "stop"


async def stop_strings_reach_across_tokens(service: Service, oracle: Oracle, tokenizer: Tokenizer) -> None:
    prompt = random_prompt(40, seed=4)
    whole = oracle.greedy(prompt, 40, ignore_eos=True)
    text = tokenizer.decode(whole)
    windows = [window for i in range(len(text)) if "\ufffd" not in (window := text[i : i + 4])]
    for stop in (windows[1], windows[len(windows) // 2]):
        answer = await ask(service, prompt, 40, temperature=0, ignore_eos=True, stop=["no such text", stop])
        assert answer.text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        needed = next(i for i in range(1, 41) if stop in tokenizer.decode(whole[:i]))
        assert answer.token_ids == whole[:needed]
        assert answer.usage.completion_tokens == needed
    later = await ask(service, prompt, 40, temperature=0, ignore_eos=True, stop=[windows[1]], min_tokens=30)
    assert len(later.token_ids) >= 30
    # A stop string of one character whose two bytes are two tokens.
    first, second = (int(token_id) for token_id in tokenizer.encode("\u0151"))
    halves = {first: 100.0, second: 100.0}
    answer = await ask(service, prompt, 200, seed=1, ignore_eos=True, logit_bias=halves, stop=["\u0151"])
    assert answer.token_ids[-2:] == [first, second]
    assert (first, second) not in zip(answer.token_ids, answer.token_ids[1:-1], strict=False)
    assert answer.text == "\ufffd" * len(answer.text)


async def text_is_what_the_tokens_decode_to(service: Service, tokenizer: Tokenizer) -> None:
    """Random bytes, good and bad characters among them, on both APIs."""
    first, second = (int(token_id) for token_id in tokenizer.encode("\u0151"))
    bias = {first: 9.0, second: 9.0}
    answer = await ask(service, random_prompt(40, seed=5), 300, seed=2, ignore_eos=True, logit_bias=bias)
    assert answer.text == tokenizer.decode(answer.token_ids)
    assert "\u0151" in answer.text
    body = {
        "prompt": random_prompt(40, seed=5),
        "max_tokens": 300,
        "seed": 2,
        "ignore_eos": True,
        "logit_bias": {str(token_id): value for token_id, value in bias.items()},
        "stream": True,
    }
    pieces = []
    async with (
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body) as events,
    ):
        async for line in events.aiter_lines():
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert "".join(pieces) == answer.text


async def choices_are_seeds_one_after_the_other(service: Service) -> None:
    prompt = random_prompt(40, seed=6)
    several = await ask(service, prompt, 30, n=3, seed=100, ignore_eos=True)
    single = [await ask(service, prompt, 30, seed=100 + i, ignore_eos=True) for i in range(3)]
    assert [choice.token_ids for choice in several.choices] == [answer.token_ids for answer in single]
    assert several.usage.completion_tokens == 90
    assert len({tuple(choice.token_ids) for choice in several.choices}) == 3
    async with openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none") as client:
        texts = [
            (
                await client.completions.create(
                    model="tiny-llama", prompt=prompt, max_tokens=30, n=3, seed=100, extra_body={"ignore_eos": True}
                )
            )
            .choices[i]
            .text
            for i in range(3)
        ]
    assert texts == [choice.text for choice in several.choices]


async def seeds_decide_alone(service: Service) -> None:
    """Alone or in a batch, prompt run here or there, cached or not, and when a worker is lost in the middle."""
    prompt = random_prompt(100, seed=7)
    for options in (TRUNCATED, PENALIZED):
        alone = await ask(service, prompt, 120, seed=5, ignore_eos=True, **options)
        await until_idle(service)
        await until_tree_is_right(service)
        again = await ask(service, prompt, 120, seed=5, ignore_eos=True, **options)
        assert again.token_ids == alone.token_ids
        others = [ask(service, random_prompt(20 + i, seed=i), 100, ignore_eos=True, temperature=1) for i in range(12)]
        crowd = await asyncio.gather(
            *others, *(ask(service, prompt, 120, seed=5, ignore_eos=True, **options) for _ in "abc")
        )
        assert [answer.token_ids for answer in crowd[-3:]] == [alone.token_ids] * 3
        assert {answer.served_by[0].prefill_worker for answer in (alone, *crowd)} == {"", "prefill-1"}
    alone = await ask(service, prompt, LONG, seed=5, ignore_eos=True, **PENALIZED)
    survivors = await while_a_worker_dies(service, prompt, LONG, seed=5, ignore_eos=True, **PENALIZED)
    assert all(answer.token_ids == alone.token_ids for answer in survivors)
    assert any(answer.served_by[0].attempts > 1 for answer in survivors)


async def while_a_worker_dies(service: Service, prompt: list[int], max_tokens: int, **options: object) -> list[Answer]:
    """Always the same, by four callers; a decode worker that is busy with them is killed after some tokens."""
    sampling = pb.SamplingOptions(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)
    num_tokens, some = 0, asyncio.Event()

    def count(piece: pb.Piece) -> None:
        nonlocal num_tokens
        num_tokens += len(piece.token_ids)
        if num_tokens > 80:
            some.set()

    async def generate(number: int) -> Answer:
        return await service.client.generate(request, 60, count)

    _, answers = await killed_while_busy(service, ["decode-1", "decode-2"], generate, 4, begun=some)
    return list(answers.values())
