"""A budget for reasoning: where it is used up, the answer goes on behind the end of the reasoning, exactly."""

import asyncio

import pytest
from msgspec.structs import replace

from baton_proto.sampling import TokenLogprobs
from baton_proto.worker import Delta, Submit
from router.parsing.events import Reasoning, Text
from router.parsing.families import REASONING_FAMILIES
from router.parsing.parsing import Parsing
from router.requests.answer import Answer
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.detokenizer import MAX_UNFINISHED
from router.text.tokenizer import Tokenizer
from tests.router.scripted_worker import ScriptedWorker, next_token, tokens_of
from tests.router.small_router import PROMPT, request, routing, stream

BUDGET = 4


@pytest.fixture
def end(tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode("\n</think>\n\n", add_special_tokens=False).tolist())


def thinking(max_tokens: int, end: tuple[int, ...], stop: tuple[str, ...] = ()) -> GenerateRequest:
    parsing = Parsing(
        None, REASONING_FAMILIES["think"], frozenset(), in_reasoning=True, thinking_tokens=BUDGET, end_of_thinking=end
    )
    return replace(request(max_tokens, stop=stop), parsing=parsing)


async def in_steps_of_three(worker: ScriptedWorker, submit: Submit) -> None:
    """Several tokens per step, so that the budget ends within a step."""
    token_ids = tokens_of(submit)
    last = submit.num_prompt_tokens + submit.sampling.max_tokens
    while len(token_ids) < last:
        await asyncio.sleep(0)
        new: list[int] = []
        while len(new) < 3 and len(token_ids) < last:
            new.append(next_token(token_ids))
            token_ids.append(new[-1])
        worker.send(Delta(submit.request_id, token_ids=new, finish="length" if len(token_ids) == last else None))


def written(end: tuple[int, ...], max_tokens: int) -> list[int]:
    """By an undisturbed model whose reasoning is ended."""
    token_ids = list(PROMPT)
    while len(token_ids) < len(PROMPT) + max_tokens:
        token_ids += [next_token(token_ids)]
        if len(token_ids) == len(PROMPT) + BUDGET:
            token_ids += end
    return token_ids[len(PROMPT) :][:max_tokens]


async def test_the_answer_goes_on_from_the_end_of_the_reasoning(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    worker = ScriptedWorker("d0", script=in_steps_of_three)
    async with routing(tokenizer, worker) as router:
        items = [item async for item in stream(router, thinking(30, end))]
        pieces = [item for item in items if isinstance(item, Piece)]
        output = [token for piece in pieces for token in piece.token_ids]
        assert output == written(end, 30)
        events = [event for piece in pieces if piece.parsed for event in piece.parsed.events]
        thought = "".join(event.text for event in events if isinstance(event, Reasoning))
        text = "".join(event.text for event in events if isinstance(event, Text))
        assert thought == tokenizer.decode(output[:BUDGET]) + "\n"
        assert text == tokenizer.decode(output[BUDGET + len(end) :])
        assert sum(piece.parsed.reasoning_tokens for piece in pieces if piece.parsed) <= BUDGET + len(end)
        first, second = worker.submits
        assert tokens_of(second) == PROMPT + output[: BUDGET + len(end)]
        assert second.num_prompt_tokens == len(PROMPT)
        assert isinstance(items[-1], Finished)
        assert items[-1].tokens.output_tokens == 30
        assert items[-1].served_by[0].attempts == 2
        assert first.request_id != second.request_id
        router.check_idle()


@pytest.mark.parametrize("max_tokens", [BUDGET, BUDGET + 2])
async def test_the_limit_of_tokens_holds_for_the_end_of_the_reasoning_too(
    tokenizer: Tokenizer, end: tuple[int, ...], max_tokens: int
) -> None:
    assert len(end) > 2
    worker = ScriptedWorker("d0", script=in_steps_of_three)
    async with routing(tokenizer, worker) as router:
        pieces = [item async for item in stream(router, thinking(max_tokens, end)) if isinstance(item, Piece)]
        assert [token for piece in pieces for token in piece.token_ids] == written(end, max_tokens)
        assert pieces[-1].finish_reason == "length"
        assert len(worker.submits) == 1
        router.check_idle()


def test_reasoning_that_ends_in_time_is_left_alone(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    token_ids = tokenizer.encode("a</think>" + "b" * 20, add_special_tokens=False).tolist()
    generous = replace(thinking(100, end).parsing, thinking_tokens=len(token_ids))  # type: ignore[type-var]
    answer = Answer(tokenizer, replace(thinking(100, end), parsing=generous), 0)
    piece = answer.take(list(token_ids), [], None, None)
    assert piece.token_ids == token_ids
    assert not answer.turned


def test_forced_tokens_have_logprobs_where_the_others_do(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    answer = Answer(tokenizer, thinking(100, end), 0)
    token_ids = PROMPT[:6]
    piece = answer.take(list(token_ids), [TokenLogprobs(-1.0, [])] * 6, None, None)
    assert piece.token_ids == [*token_ids[:BUDGET], *end]
    assert [each.logprob for each in piece.logprobs] == [-1.0] * BUDGET + [0.0] * len(end)
    assert answer.turned


def test_a_stop_string_in_the_end_of_the_reasoning_stops(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    answer = Answer(tokenizer, thinking(100, end, stop=("</think>",)), 0)
    piece = answer.take(PROMPT[:6], [], None, None)
    assert (piece.finish_reason, piece.stop_reason) == ("stop", "</think>")
    assert not answer.turned


def test_an_answer_that_ends_with_its_budget_has_ended(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    answer = Answer(tokenizer, thinking(BUDGET, end), 0)
    piece = answer.take(PROMPT[:BUDGET], [], "stop", None)
    assert (piece.finish_reason, piece.token_ids) == ("stop", PROMPT[:BUDGET])
    assert not answer.turned


def test_a_character_that_the_budget_cuts_is_completed_first(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    letters = tokenizer.encode("abc", add_special_tokens=False).tolist()
    cut = tokenizer.encode("\U0001f98a", add_special_tokens=False).tolist()
    assert len(letters) == BUDGET - 1
    assert len(cut) > 1
    answer = Answer(tokenizer, thinking(100, end), 0)
    piece = answer.take([*letters, *cut, *letters], [], None, None)
    assert piece.token_ids == [*letters, *cut, *end]
    assert piece.text.startswith("abc\U0001f98a\n")
    assert answer.turned


def test_what_never_becomes_a_character_ends_the_reasoning_too(tokenizer: Tokenizer, end: tuple[int, ...]) -> None:
    lead = tokenizer.encode("\U0001f98a", add_special_tokens=False).tolist()[0]
    answer = Answer(tokenizer, thinking(100, end), 0)
    piece = answer.take([lead] * 50, [], None, None)
    assert piece.token_ids == [lead] * (BUDGET + MAX_UNFINISHED) + list(end)
