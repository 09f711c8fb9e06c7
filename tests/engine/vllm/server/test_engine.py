"""What a server is sent for a request, and what a worker is told of its answers and its load."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from baton_proto.grammar import Grammar
from baton_proto.kv_events import Cleared
from baton_proto.sampling import MAX_SEED, PARAMETERS, SamplingParams, TokenLogprobs
from engine.sequences.sequence import Sequence
from engine.vllm.cache import salt_of
from engine.vllm.events.stream import Lost, Message
from engine.vllm.server.cache import ExternalCache
from engine.vllm.server.completion import Completion, Item, completion, item_of, whole_item_of
from engine.vllm.server.core import News
from engine.vllm.server.engine import ExternalEngine
from router.api.wishes.prompt_logprobs import Row, rows_in_parts
from runtime.blocks.block_hash import block_hashes, lora_seed, sequence_hashes
from runtime.errors import ProtocolError
from tests.engine.vllm.events.vllm_engine import Messages

BLOCK = 4
FOR_ANOTHER = Completion("r/1", b"", streams=False)
EOS = frozenset({2})
OTHER_VALUES: dict[str, Any] = {
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "stop_token_ids": (9,),
    "ignore_eos": True,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "logit_bias": {11: -5.0},
    "bad_words": ("no",),
    "allowed_token_ids": (3, 4),
    "vllm_xargs": {"a": [1, "b"]},
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "logprob_token_ids": (3, 4),
    "grammar": Grammar("regex", "[ab]+"),
}


def sequence(tokens: list[int], **sampling: Any) -> Sequence:
    return Sequence("r/1", tokens, len(tokens), SamplingParams(**{"max_tokens": 8} | sampling))


def body(of: Sequence) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode(completion(of, of.token_ids, "theirs", EOS).body)
    return told


class Core:
    """In the place of the server's: it has the news that the test puts."""

    def __init__(self) -> None:
        self.news = News()

    async def get_output_async(self) -> News:
        return self.news

    async def add_request_async(self, request: Any) -> None: ...


def engine() -> tuple[ExternalEngine, Core, ExternalCache]:
    core, cache = Core(), ExternalCache(BLOCK, 100)
    return ExternalEngine(core, cache, "theirs", EOS), core, cache  # type: ignore[arg-type]


def test_every_sampling_parameter_is_sent_or_refused() -> None:
    plain = body(sequence([3, 4]))
    for name in PARAMETERS.keys() - {"max_tokens"}:
        assert body(sequence([3, 4], is_seeded=True, **{name: OTHER_VALUES[name]})) != plain, name


def test_a_seed_that_the_caller_did_not_give_stays_here() -> None:
    assert "seed" not in body(sequence([3, 4], seed=7))


def test_the_largest_values_are_in_a_form_that_the_server_takes() -> None:
    of = sequence([3, 4], seed=MAX_SEED, is_seeded=True, logit_bias={11: -100.0})
    of.priority = 3
    told = body(of)
    assert told["seed"] == MAX_SEED
    assert told["logit_bias"] == {"11": -100.0}
    assert told["priority"] == -3
    assert (told["prompt"], told["model"], told["stream"], told["return_token_ids"]) == ([3, 4], "theirs", True, True)
    assert told["stop_token_ids"] == [2]
    assert "cache_salt" not in told


def test_a_prompt_for_another_server_ends_by_its_length_alone_and_its_answer_begins_with_what_was_told() -> None:
    of = Sequence("r/1", [3, 4], 2, SamplingParams(max_tokens=8, grammar=Grammar("regex", "[ab]+")), prefill_only=True)
    told = body(of)
    assert told["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (told["max_tokens"], told["min_tokens"], told["ignore_eos"], told["stream"]) == (1, 1, True, False)
    assert told["stop_token_ids"] == []
    assert "structured_outputs" not in told
    choices = [{"token_ids": [9], "finish_reason": "length"}]
    for params in ({"remote_block_ids": [[1]]}, None):
        item = whole_item_of(FOR_ANOTHER, msgspec.json.encode({"choices": choices, "kv_transfer_params": params}))
        assert (item.new_token_ids, item.finish_reason) == ([9], "length")
        after = sequence([3, 4])
        after.transfer = item.transfer
        assert body(after).get("kv_transfer_params") == params
    with pytest.raises(ProtocolError, match="the answer to a prompt"):
        whole_item_of(FOR_ANOTHER, b'{"choices": []}')


def test_log_probabilities_of_a_prompt_come_with_the_whole_answer_the_best_first() -> None:
    asked = completion(sequence([3, 4, 5], prompt_logprobs=1, logprobs=0), [3, 4, 5], "theirs", EOS)
    told = msgspec.json.decode(asked.body)
    assert (told["prompt_logprobs"], told["stream"], asked.streams) == (1, False, False)
    scored: list[Any] = [None, {"4": {"logprob": -9.0, "rank": 7}, "8": {"logprob": -0.5, "rank": 1}}]
    scored.append({"5": {"logprob": -0.25, "rank": 1, "decoded_token": "x"}})
    choice: dict[str, Any] = {"token_ids": [9], "finish_reason": "length", "prompt_logprobs": scored}
    choice["logprobs"] = {"token_logprobs": [-3.0], "top_logprobs": [{"token_id:9": -3.0}]}
    item = whole_item_of(asked, msgspec.json.encode({"choices": [choice]}))
    assert (item.new_token_ids, item.new_logprobs) == ([9], [TokenLogprobs(-3.0, [(9, -3.0)])])
    found = item.prompt_logprobs
    assert found is not None
    assert found.fits(3)
    rows = [row for part in rows_in_parts(np.array([3, 4, 5], dtype=np.uint32), found) for row in part]
    assert rows == [Row(3), Row(4, -9.0, 7, [(8, -0.5)]), Row(5, -0.25, 1, [(5, -0.25)])]
    wrong_rows: list[Any] = [None, scored[:2], [None, {}, {}], [None, None, None]]
    for wrong in wrong_rows:
        answer = msgspec.json.encode({"choices": [choice | {"prompt_logprobs": wrong}]})
        with pytest.raises(ProtocolError, match="log-probabilities of a prompt"):
            whole_item_of(asked, answer)


async def test_alternatives_are_those_that_were_asked_for_behind_the_sampled_token() -> None:
    made, core, _ = engine()
    made.add(sequence([3, 4], logprobs=2, logprob_token_ids=(8, 7)))
    core.news = News([Item("r/1", [5], [TokenLogprobs(-1.0, [(7, -0.5), (5, -1.0), (8, -2.0)])])])
    (told,) = (await made.next_step()).outputs
    assert told.logprobs == [TokenLogprobs(-1.0, [(5, -1.0), (8, -2.0), (7, -0.5)])]
    prompt = Sequence("p", [3], 1, SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=(8,)), prefill_only=True)
    assert "logprob_token_ids" not in body(prompt)


async def test_what_is_offered_is_forgotten_with_the_first_token() -> None:
    made, core, _ = engine()
    of = sequence([3, 4])
    of.transfer = b"{}"
    made.add(of)
    assert made.load().queued_prefill_tokens == 0, "another server has computed the prompt"
    core.news = News([Item("r/1", [5])])
    await made.next_step()
    assert of.transfer == b""
    for transfer in (b"", b"{}"):
        made.add(Sequence("p", [3, 4], 2, SamplingParams(max_tokens=8), prefill_only=True))
        core.news = News([Item("p", [5], finish_reason="length", transfer=transfer)])
        (output,) = (await made.next_step()).outputs
        assert (output.sequence.transfer, made.offers_nothing) == (transfer, not transfer)


def test_an_adapter_is_asked_for_by_its_name_and_needs_no_salt() -> None:
    of = Sequence("r", [3, 4, 5, 6, 7], 5, SamplingParams(max_tokens=1), adapter="sql")
    assert body(of)["model"] == "sql"
    assert "cache_salt" not in body(of)
    of.hash_blocks(1, 4)
    assert of.block_hashes == block_hashes(np.array([3, 4, 5, 6], dtype=np.uint32), 4, lora_seed("sql")).tolist()


def test_a_cache_salt_of_ours_is_one_of_theirs() -> None:
    of = Sequence("r", [3], 1, SamplingParams(max_tokens=1), hash_seed=99)
    assert body(of)["cache_salt"] == salt_of(99)


def test_a_replay_sends_prompt_and_output_and_asks_for_the_rest() -> None:
    of = Sequence("r", [3, 4, 5], 2, SamplingParams(max_tokens=8, min_tokens=3))
    told = body(of)
    assert (told["prompt"], told["max_tokens"], told["min_tokens"]) == ([3, 4, 5], 7, 2)


async def test_alternatives_come_best_first_and_not_more_than_asked_for() -> None:
    top = {"token_id:9": -3.0, "token_id:4": -0.5, "token_id:7": -1.0}
    choice = {"token_ids": [9], "finish_reason": None, "logprobs": {"token_logprobs": [-3.0], "top_logprobs": [top]}}
    item = item_of(Completion("r/1", b"{}"), msgspec.json.encode({"choices": [choice]}))
    made, _, _ = engine()
    made.add(of := sequence([3], logprobs=2))
    assert made._logprobs(of, item) == [TokenLogprobs(-3.0, [(4, -0.5), (7, -1.0)])]


@pytest.mark.parametrize("top", [[], [{"a": -1.0}], [{"token_id:x": -1.0}]])
def test_log_probabilities_that_are_none_are_refused(top: list[Any]) -> None:
    choice = {"token_ids": [9], "logprobs": {"token_logprobs": [-3.0], "top_logprobs": top}}
    with pytest.raises(ProtocolError, match="log-probabilities"):
        item_of(Completion("r", b"{}"), msgspec.json.encode({"choices": [choice]}))


async def test_cached_tokens_are_those_that_events_have_told_when_the_request_left() -> None:
    made, core, cache = engine()
    messages = Messages()
    tokens = list(range(10, 10 + 3 * BLOCK))
    cache.take(Message(0, messages.payload(messages.stored([1, 2], None, tokens[: 2 * BLOCK]))))
    for prompt, cached in (
        ([*tokens, 1], 2 * BLOCK),
        (tokens[: 2 * BLOCK], BLOCK),  # its last token has to be computed
        ([1, *tokens], 0),
    ):
        of = sequence(prompt)
        made.add(of)
        core.news = News([Item("r/1", [5], finish_reason="stop")])
        output = (await made.next_step()).outputs[0]
        assert (output.sequence.num_cached_tokens, output.finish, output.stop_token) == (cached, "stop", 5)
    assert cache.take(Lost("gone")) == [Cleared()]
    names = sequence_hashes(block_hashes(np.array(tokens, dtype=np.uint32), BLOCK)).tolist()
    assert cache.num_held(names) == 0


async def test_requests_and_blocks_of_others_count_in_the_load() -> None:
    made, core, _ = engine()
    made.add(sequence([3, 4]))
    stats = SimpleNamespace(num_running_reqs=4, num_waiting_reqs=1, kv_cache_usage=0.5, iteration_details=None)
    core.news = News(scheduler_stats=stats)
    await made.next_step()
    load = made.load()
    assert (load.running + load.waiting, load.blocks_used, load.blocks_total) == (5, 50, 100)
    core.news = News([Item("r/1", [5], finish_reason="length")])
    await made.next_step()
    stats.num_waiting_reqs = 1  # as of before the end of ours
    core.news = News(scheduler_stats=stats)
    await made.next_step()
    assert (made.load().running, made.load().waiting, made.load().blocks_used) == (4, 0, 50)


async def test_prompts_are_timed_also_beside_others_but_not_beside_those_of_others() -> None:
    made, core, _ = engine()
    for name in ("a", "b", "c", "d"):
        made.add(Sequence(name, [3] * 5, 5, SamplingParams(max_tokens=8)))
        core.news = News([Item(name, [5])])
        core.news.timestamp += ord(name) - ord("a") + 1  # a second apart
        await made.next_step()
    first, second, _ = made.timed_steps.take()
    assert (first.prompt_tokens, first.sequences, first.step_ms > 0) == (5, 0, True)
    assert (second.prompt_tokens, second.sequences, second.context_tokens) == (5, 1, 6)
    stats = SimpleNamespace(num_running_reqs=9, num_waiting_reqs=0, kv_cache_usage=0.5, iteration_details=None)
    core.news = News(scheduler_stats=stats)
    await made.next_step()
    for name in ("e", "f"):
        made.add(Sequence(name, [3] * 5, 5, SamplingParams(max_tokens=8)))
        core.news = News([Item(name, [5])])
        await made.next_step()
    assert made.timed_steps.take() == []
