import dataclasses
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from baton_proto.generated import inference_pb2 as pb
from baton_proto.images import Image
from baton_proto.sampling import MAX_SEED, PARAMETERS
from router.api.grpc.messages import options_of
from router.api.wishes.sampling_options import Options, chosen_defaults, model_defaults
from router.api.wishes.validation import IN_PLACE_CHARS, Call, Chat, Kept, Prompt, make_request_id, validate
from router.requests.frontend import Frontend
from router.requests.request import GenerateRequest
from router.text.chat_template import SLOT
from runtime.blocks.block_hash import SEED
from runtime.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelError
from tests.clock import Clock
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

CALL = Call(request_id="r1")


@pytest.fixture
def frontend(tiny_model: Path) -> Frontend:
    return make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))


def with_limits(frontend: Frontend, max_model_len: int, pool_tokens: int | None = None) -> Frontend:
    assert isinstance(frontend.generator, ScriptedGenerator)
    frontend.generator.max_model_len, frontend.generator.pool_tokens = max_model_len, pool_tokens
    return frontend


async def check(frontend: Frontend, prompt: Prompt = "Hello", call: Call = CALL, **options: Any) -> GenerateRequest:
    given = {name: options.pop(name) for name in PARAMETERS if name in options}
    return await validate(frontend, call, prompt, Options(given=given, **options))


async def test_absent_options_take_the_documented_defaults(frontend: Frontend, clock: Clock) -> None:
    request = await check(frontend)
    (sampling,) = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (0, (), False)
    assert (sampling.logprobs, sampling.logit_bias) == (None, {})
    assert sampling.max_tokens == 4096 - len(request.prompt)
    assert request.deadline_s == pytest.approx(clock.now_s + 60, rel=0, abs=1e-3)


QWEN3 = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


async def test_the_models_defaults_hold_where_a_request_does_not_say(frontend: Frontend) -> None:
    frontend = dataclasses.replace(frontend, sampling_defaults=QWEN3 | {"max_tokens": 100})
    (sampling,) = (await check(frontend)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.95, 20, 100)
    assert [(await check(frontend, top_k=top_k)).sampling[0].top_k for top_k in (-1, 0, 1)] == [0, 0, 1]
    (sampling,) = (await check(frontend, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=200)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 200)
    (short,) = (await check(with_limits(frontend, 50))).sampling
    assert short.max_tokens < 50


async def test_a_greedy_request_is_spared_the_models_truncation(frontend: Frontend) -> None:
    frontend = dataclasses.replace(frontend, sampling_defaults=QWEN3 | {"repetition_penalty": 1.1})
    (sampling,) = (await check(frontend, temperature=0.0)).sampling
    assert (sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 0, 1.1)


def test_the_models_defaults_are_what_vllm_takes_of_generation_config_json(tmp_path: Path) -> None:
    assert model_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(QWEN3 | {"do_sample": False, "max_new_tokens": 512, "min_p": None, "num_beams": 4}))
    assert model_defaults(tmp_path) == QWEN3 | {"max_tokens": 512}


def test_the_defaults_are_those_of_the_model_of_a_folder_or_of_nobody(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, top_k in ((model, 20), (other, 3)):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({"top_k": top_k}))
    assert [chosen_defaults(chosen, model) for chosen in ("auto", "none", str(other))] == [
        {"top_k": 20},
        {},
        {"top_k": 3},
    ]
    with pytest.raises(ConfigError, match=r"router\.generation_config: 'atuo' is neither auto nor none, nor a folder"):
        chosen_defaults("atuo", model)


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 2.5}, {"max_new_tokens": 0}])
def test_a_models_defaults_that_cannot_be_are_refused_with_the_way_out(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"generation_config\.json: .*`none` in its place goes without"):
        model_defaults(tmp_path)


async def test_a_seed_is_drawn_when_none_is_given(frontend: Frontend) -> None:
    seeds = {(await check(frontend, call=Call())).sampling[0].seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


async def test_choices_differ_by_their_seed_alone(frontend: Frontend) -> None:
    assert (await check(frontend, seed=-1)).sampling[0].seed == MAX_SEED
    assert (await check(frontend, seed=-MAX_SEED)).sampling[0].seed == 1
    request = await check(frontend, n=3, seed=MAX_SEED - 1)
    assert [sampling.seed for sampling in request.sampling] == [MAX_SEED - 1, MAX_SEED, 0]
    assert {sampling.max_tokens for sampling in request.sampling} == {request.sampling[0].max_tokens}


@pytest.mark.parametrize(
    ("options", "field", "problem"),
    [
        ({"temperature": math.nan}, "temperature", "is nan"),
        ({"temperature": math.inf}, "temperature", "is inf"),
        ({"top_k": 10**40}, "top_k", "at most 2147483647"),
        ({"max_tokens": 0, "names": {"max_tokens": "max_completion_tokens"}}, "max_completion_tokens", "at least 1"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "is 6, above the 5 tokens"),
        ({"stop": ["a"] * 17}, "stop", "has 17 strings; at most 16"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": ["a" * 1025]}, "stop", "has a string of 1025 characters; at most 1024"),
        ({"logprobs": 21, "names": {"logprobs": "top_logprobs"}}, "top_logprobs", "at most 20"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "has 1025 entries; at most 1024 are allowed"),
        ({"logit_bias": dict.fromkeys(range(2000), 1.0)}, "logit_bias", "has 2000 entries; at most 1024 are allowed"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "token id -1"),
        ({"logit_bias": {5: math.nan}}, "logit_bias[5]", "is nan"),
        ({"bad_words": ["a"] * 129}, "bad_words", "has 129 entries; at most 128 are allowed"),
        ({"bad_words": ["a" * 257]}, "bad_words", "has a string of 257 characters; at most 256"),
        ({"bad_words": ["a", ""]}, "bad_words", "empty string"),
        ({"bad_words": ["\n"]}, "bad_words", "a word without a token"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "is empty; at least 1 is needed"),
        ({"vllm_xargs": {"a": "b" * 20_000}}, "vllm_xargs", "at most 16384 are allowed"),
        ({"vllm_xargs": {"a": [0] * 65}}, "vllm_xargs", "length <= 64"),
        ({"vllm_xargs": {"a": 2**63}}, "vllm_xargs", "<= 9223372036854775807"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params", "leave it out"),
        ({"repetition_detection": {"count": 2}}, "repetition_detection.'count'", "is unknown; min_pattern_size"),
        ({"repetition_detection": {"max_pattern_size": 3}}, "repetition_detection.min_count", "at least 2"),
        ({"repetition_detection": {"max_pattern_size": 1025}}, "repetition_detection.max_pattern_size", "at most 1024"),
        ({"repetition_detection": {"min_pattern_size": 2}}, "repetition_detection.min_pattern_size", "is 2, above max"),
        ({"logprob_token_ids": [5], "names": {"logprobs": "top_logprobs"}}, "logprob_token_ids", "needs top_logprobs"),
        ({"logprob_token_ids": [512], "logprobs": 1}, "logprob_token_ids", "not in the vocabulary"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 17}, "n", "at most 16"),
    ],
)
async def test_what_no_row_of_sampling_parameters_says_is_refused_with_field_and_limit(
    frontend: Frontend, options: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await check(frontend, **options)
    assert caught.value.field == field
    assert problem in caught.value.problem


async def test_a_bad_word_is_forbidden_as_it_stands_and_behind_a_space(frontend: Frontend) -> None:
    encode = partial(frontend.tokenizer.encode, add_special_tokens=False)
    word = next(word for word in ("a", "the", "of", "e") if len(encode(word)) == len(encode(f" {word}")) == 1)
    (sampling,) = (await check(frontend, bad_words=[f" {word}", "two words"])).sampling
    assert sampling.bad_words == (f" {word}", "two words")
    first, behind, *long = sampling.bad_word_ids
    assert (list(first), list(behind)) == (encode(word).tolist(), encode(f" {word}").tolist())
    assert list(long[0]) == encode("two words").tolist()


async def test_given_alternatives_decide_how_many_there_are(frontend: Frontend) -> None:
    (sampling,) = (await check(frontend, logprobs=1, logprob_token_ids=[5, 7, 9])).sampling
    assert (sampling.logprobs, sampling.logprob_token_ids) == (3, (5, 7, 9))


async def test_what_vllm_alone_has_is_taken_as_it_is(frontend: Frontend) -> None:
    xargs = {"a": 1, "b": [0.5, "c"]}
    assert (await check(frontend, vllm_xargs=xargs)).sampling[0].vllm_xargs == xargs
    options = options_of(pb.SamplingOptions(vllm_xargs=json.dumps(xargs)))
    assert (await validate(frontend, CALL, "Hello", options)).sampling[0].vllm_xargs == xargs
    for wrong in ("[]", '{"a": {}}', "{"):
        with pytest.raises(InvalidRequestError, match="vllm_xargs"):
            options_of(pb.SamplingOptions(vllm_xargs=wrong))


async def test_a_repetition_that_has_no_token_is_none(frontend: Frontend) -> None:
    loops = {"max_pattern_size": 3, "min_count": 2}
    for told in (loops, {"max_pattern_size": 0, "min_count": 0}):
        options = options_of(pb.SamplingOptions(repetition_detection=told))
        wanted = (await check(frontend, repetition_detection=told)).sampling[0].repetition_detection
        assert wanted == (await validate(frontend, CALL, "Hello", options)).sampling[0].repetition_detection
        assert wanted == (loops if told is loops else {})


async def test_values_at_their_limits_are_taken(frontend: Frontend) -> None:
    bounded = [row for row in PARAMETERS.values() if row.rule.high is not None and row.name != "logit_bias"]
    rules = {row.name: row.rule for row in bounded}
    low = {name: math.nextafter(rule.low, math.inf) if rule.open_below else rule.low for name, rule in rules.items()}
    high = {name: rule.high for name, rule in rules.items()}
    await check(frontend, **low, n=1, logit_bias={0: -100.0}, stop=["x"])
    await check(frontend, **high, n=16, logit_bias={511: 100.0}, stop=["x" * 1024] * 16, stop_token_ids=[511])


@pytest.mark.parametrize(
    ("prompt", "field", "problem"),
    [
        ("", "prompt", "is empty"),
        ([], "prompt", "is empty"),
        (Chat([]), "prompt", "is empty; at least one message"),
        ([1, VOCAB_SIZE], "prompt", "token id 512 is not in the vocabulary, 0 to 511"),
        ([-1], "prompt", "token id -1"),
        ([2**70], "prompt", "is not in the vocabulary"),
        ("\ud800", "prompt", "not valid Unicode"),
    ],
)
async def test_bad_prompts_are_refused(frontend: Frontend, prompt: Prompt, field: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await check(frontend, prompt)
    assert caught.value.field == field
    assert problem in caught.value.problem


async def test_the_prompt_is_called_what_its_caller_calls_it(frontend: Frontend) -> None:
    with_limits(frontend, 100)
    long_chat = Chat([{"role": "user", "content": "ő" * 60}])  # few characters, many tokens
    for prompt in ("", [], [VOCAB_SIZE], [5] * 100, "a b" * 99, Chat([]), long_chat):
        with pytest.raises(InvalidRequestError) as caught:
            await check(frontend, prompt, replace(CALL, prompt_field="chat.messages"))
        assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(("length", "fits"), [(99, True), (100, False), (5000, False)])
async def test_a_prompt_must_leave_room_for_one_token(frontend: Frontend, length: int, fits: bool) -> None:
    with_limits(frontend, 100)
    if fits:
        assert (await check(frontend, [5] * length)).sampling[0].max_tokens == 1
        return
    with pytest.raises(ContextLengthError, match=rf"prompt: has {length} tokens, .*; the model takes 100"):
        await check(frontend, [5] * length)


async def test_prompt_and_output_together_must_fit(frontend: Frontend) -> None:
    with_limits(frontend, 100)
    assert (await check(frontend, [5] * 90, max_tokens=10)).sampling[0].max_tokens == 10
    problem = "max_tokens: is 11, the prompt has 90 tokens; the model takes 100 in all"
    with pytest.raises(ContextLengthError, match=problem):
        await check(frontend, [5] * 90, max_tokens=11)


async def test_a_worker_that_is_away_takes_long_requests_when_it_is_back(frontend: Frontend) -> None:
    """Whoever does not say how long the answer may be is served by those that are there."""
    assert isinstance(frontend.generator, ScriptedGenerator)
    with_limits(frontend, 100, pool_tokens=20)
    frontend.generator.away_tokens = 64
    assert (await check(frontend, [5] * 15)).sampling[0].max_tokens == 5
    assert (await check(frontend, [5] * 15, max_tokens=40)).sampling[0].max_tokens == 40
    assert (await check(frontend, [5] * 60)).sampling[0].max_tokens == 4
    with pytest.raises(ContextLengthError, match="the largest worker takes 64"):
        await check(frontend, [5] * 64)


async def test_the_largest_pool_is_a_limit_too(frontend: Frontend) -> None:
    with_limits(frontend, 100, pool_tokens=64)
    with pytest.raises(ContextLengthError, match="the largest worker takes 64"):
        await check(frontend, [5] * 64)
    assert (await check(frontend, [5] * 60)).sampling[0].max_tokens == 4
    with_limits(frontend, 100, pool_tokens=1000)
    with pytest.raises(ContextLengthError, match="the model takes 100"):
        await check(frontend, [5] * 100)


async def test_absurdly_long_text_is_refused_without_tokenizing_it(frontend: Frontend, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(frontend.tokenizer), "encode", lambda *_: pytest.fail("tokenized"))
    for prompt in ("a" * 8_000_000, Chat([{"role": "user", "content": "a" * 8_000_000}])):
        with pytest.raises(ContextLengthError, match=r"prompt: has 8000000 characters, more than the \d+ that"):
            await check(frontend, prompt)


async def test_long_text_gives_the_same_tokens_as_in_place(frontend: Frontend) -> None:
    text = "relay " * IN_PLACE_CHARS
    with_limits(frontend, 10**9)
    assert (await check(frontend, text)).prompt.tolist() == frontend.tokenizer.encode(text).tolist()


async def test_the_last_tokens_of_a_prompt_are_kept_where_they_are_asked_for(frontend: Frontend) -> None:
    with_limits(frontend, 100)
    text, tokens = "relay " * 50, list(range(5, 205))
    asked = [{"role": "user", "content": text}]
    whole = frontend.tokenizer.encode(text).tolist(), tokens, frontend.tokenizer.chat(asked).tolist()
    for prompt, all_of_it in zip((text, tokens, Chat(asked)), whole, strict=True):
        for last, given, kept in ((7, {}, 7), (99, {}, 99), (-1, {}, 99), (-1, {"max_tokens": 30}, 70)):
            request = await check(frontend, prompt, replace(CALL, kept=Kept(last)), **given)
            assert request.prompt.tolist() == all_of_it[-kept:]
        request = await check(frontend, prompt, replace(CALL, kept=Kept(7, "right")))
        assert request.prompt.tolist() == all_of_it[:7]
    short = await check(frontend, "Hello", replace(CALL, kept=Kept(50)))
    assert short.prompt.tolist() == frontend.tokenizer.encode("Hello").tolist()


async def test_a_text_that_is_cut_keeps_the_tokens_that_training_has_before_it(tmp_path: Path) -> None:
    """Unless the side is named where it is cut: so does vLLM, whose tokenizer cuts in the one case, and it the list of
    tokens in the other."""
    folder = write_tiny_model(tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template: dict[str, Any] = {"type": "TemplateProcessing", "single": [*first], "pair": [*first]}
    described["post_processor"] = template | {"special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    (folder / "tokenizer.json").write_text(json.dumps(described))
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(folder)))
    whole = frontend.tokenizer.encode("One two three four five").tolist()
    assert (whole[0], len(whole) > 6) == (1, True)
    for kept, expected in ((Kept(4), [1, *whole[-3:]]), (Kept(4, "left"), whole[-4:]), (Kept(4, "right"), whole[:4])):
        request = await check(frontend, "One two three four five", replace(CALL, kept=kept))
        assert request.prompt.tolist() == expected


LAST = [(0, "is 0, must be at least 1, or -1"), (-2, "is -2, must be at least -1"), (100, "is 100, must .* at most 99")]


@pytest.mark.parametrize(("last", "problem"), LAST)
async def test_how_many_last_tokens_are_kept_is_bounded(frontend: Frontend, last: int, problem: str) -> None:
    with_limits(frontend, 100)
    with pytest.raises(InvalidRequestError, match=f"truncate_prompt_tokens: {problem}"):
        await check(frontend, "Hello", replace(CALL, kept=Kept(last)))


async def test_a_prompt_of_many_times_what_fits_is_refused_before_it_is_cut(frontend: Frontend) -> None:
    with_limits(frontend, 100)
    with pytest.raises(ContextLengthError, match="has 400 tokens"):
        await check(frontend, [5] * 400, replace(CALL, kept=Kept(1)))


@pytest.mark.parametrize("priority", [-(2**31) - 1, 1, 2**31])
async def test_a_priority_is_bounded(frontend: Frontend, priority: int) -> None:
    with pytest.raises(InvalidRequestError, match="priority"):
        await check(frontend, call=replace(CALL, priority=priority))


async def test_a_text_has_the_special_tokens_of_training_unless_its_caller_wants_none(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path) / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    library.save(str(path))
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tmp_path)))
    plain = (await check(frontend, call=replace(CALL, add_special_tokens=False))).prompt.tolist()
    assert (await check(frontend)).prompt.tolist() == [1, *plain]


async def test_the_callers_timeout_sets_the_deadline(frontend: Frontend, clock: Clock) -> None:
    request = await check(frontend, call=replace(CALL, timeout_s=1.5))
    assert request.deadline_s == pytest.approx(clock.now_s + 1.5, rel=0, abs=1e-3)


def test_work_ids_are_unique_even_when_callers_repeat_theirs() -> None:
    shown, work = make_request_id("mine")
    assert shown == "mine"
    assert work.startswith("mine-")
    assert make_request_id("mine")[1] != work
    drawn: Sequence[str] = make_request_id(None)
    assert drawn[0] == drawn[1]
    assert make_request_id("")[0] != drawn[0]


@pytest.mark.parametrize("wanted", ["a b", "é", "a\n", "x" * 129])
def test_request_ids_that_would_break_logs_or_headers_are_refused(wanted: str) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        make_request_id(wanted)


async def test_the_services_salt_the_tenant_and_the_callers_salt_each_change_the_hash_seed(frontend: Frontend) -> None:
    async def seed(frontend: Frontend, tenant: str = "", salt: str = "") -> int:
        return (await check(frontend, call=Call(request_id="r1", tenant=tenant, cache_salt=salt))).hash_seed

    by_tenant = dataclasses.replace(frontend, cache_per_tenant=True)
    secret = dataclasses.replace(frontend, cache_salt="secret")
    assert await seed(frontend) == await seed(frontend, "team-a") == await seed(by_tenant) == SEED
    seeds = [await seed(by_tenant, "team-a"), await seed(by_tenant, "team-b"), await seed(frontend, salt="team-a")]
    seeds += [await seed(secret), await seed(secret, salt="a"), await seed(by_tenant, "team-a", "a")]
    assert len({SEED, *seeds}) == 7


async def test_images_that_no_model_here_can_see_are_refused(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat([{"role": "user", "content": SLOT, "images": [Image("a", "data:,1")]}])
    with pytest.raises(InvalidRequestError, match="have images, and the model's chat template has no place for them"):
        await check(frontend, chat)
    monkeypatch.setattr("router.api.wishes.validation.MAX_URLS", 6)
    with pytest.raises(InvalidRequestError, match="have images of 7 characters in Base64; at most 6 are allowed"):
        await check(frontend, chat)
