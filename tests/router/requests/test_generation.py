"""Generation over scripted workers: streaming, early ends, and nothing held by whoever has ended."""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Delta, Failure, StepMessage, Submit
from router.requests import choice
from router.requests.choice import Choice
from router.requests.rate_limits import Account
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer
from router.workers.account import LoadView
from runtime.errors import (
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    RouterLeavesError,
    UnavailableError,
)
from runtime.security.callers import ANYONE
from tests.clock import Clock
from tests.router.scripted_worker import (
    ScriptedWorker,
    answer,
    answer_until,
    greedy,
    steps_of,
)
from tests.router.small_router import (
    CONFIG,
    PROMPT,
    collect,
    fails_with,
    request,
    routing,
    silent,
    stream,
    text_of,
    then_fail,
    then_hang,
)
from tests.tiny_model import VOCAB_SIZE


async def test_a_request_is_placed_streamed_and_accounted(tokenizer: Tokenizer) -> None:
    prefill, decode = ScriptedWorker("p0", "prefill"), ScriptedWorker("d0")
    async with routing(tokenizer, prefill, decode) as router:
        result = await collect(stream(router, request(10)))
        assert result.tokens == {0: greedy(PROMPT, 10)}
        assert result.texts == {0: text_of(tokenizer, greedy(PROMPT, 10))}
        assert result.reasons == {0: "length"}
        (served,) = result.finished.served_by
        assert (served.decode_worker, served.prefill_worker, served.attempts) == ("d0", "p0", 1)
        assert (served.kv_blocks, served.kv_bytes, served.transport) == (3, 300, "shm")
        assert (result.finished.tokens.prompt_tokens, result.finished.tokens.output_tokens) == (len(PROMPT), 10)
        assert result.finished.tokens.cached_tokens == 16
        (submitted,) = decode.submits
        assert submitted.prefill is not None
        assert submitted.prefill.stream_address == prefill.stream_address
        assert not prefill.submits
        router.check_idle()
        scraped = router.metrics.exposition().decode()
        assert 'baton_router_requests_total{outcome="completed"} 1.0' in scraped
        assert 'baton_router_placements_total{reason="shipped"} 1.0' in scraped
        assert 'baton_router_output_tokens_total{key="",model="tiny",tenant=""} 10.0' in scraped


async def test_deltas_that_the_router_finds_together_are_one_piece_with_all_they_say(tokenizer: Tokenizer) -> None:
    told = [TokenLogprobs(-0.1 * place, [(7, -0.5)]) for place in range(4)]
    tokens = greedy(PROMPT, 4)

    async def late(worker: ScriptedWorker, submit: Submit) -> None:
        deltas = [Delta(submit.request_id, [token_id], [of]) for token_id, of in zip(tokens, told, strict=True)]
        deltas[0] = replace(deltas[0], prompt_counts=TokenCounts(cached_tokens=16))
        deltas[-1] = replace(deltas[-1], finish="length")
        worker.send_any(StepMessage(deltas, worker.load))

    async with routing(tokenizer, ScriptedWorker("d0", script=late)) as router:
        piece, finished = [item async for item in stream(router, request(4))]
        assert isinstance(piece, Piece)
        assert isinstance(finished, Finished)
        assert (piece.token_ids, piece.logprobs) == (tokens, told)
        assert (piece.text, piece.finish_reason) == (text_of(tokenizer, tokens), "length")
        assert (finished.tokens.output_tokens, finished.tokens.cached_tokens) == (4, 16)
        router.check_idle()


async def test_choices_run_beside_each_other(tokenizer: Tokenizer) -> None:
    release = asyncio.Event()

    async def together(worker: ScriptedWorker, submit: Submit) -> None:
        if len(worker.submits) == 3:
            release.set()
        await release.wait()
        await answer(worker, submit)

    decode = ScriptedWorker("d0", script=together)
    async with routing(tokenizer, decode) as router:
        result = await collect(stream(router, request(8, n=3)))
        assert result.tokens == dict.fromkeys(range(3), greedy(PROMPT, 8))
        assert result.reasons == dict.fromkeys(range(3), "length")
        assert result.finished.tokens.output_tokens == 24
        assert sorted(submit.sampling.seed for submit in decode.submits) == [0, 1, 2]
        assert [service.index for service in result.finished.served_by] == [0, 1, 2]
        router.check_idle()


def of_length(asked: GenerateRequest, num_tokens: int) -> GenerateRequest:
    return replace(asked, prompt=np.resize(asked.prompt, num_tokens))


async def test_choices_wait_for_the_one_that_computes_their_long_prompt(tokenizer: Tokenizer) -> None:
    submitted: list[int] = []

    async def one_first(worker: ScriptedWorker, submit: Submit) -> None:
        submitted.append(submit.sampling.seed)
        if submit.sampling.seed == 0:
            for _ in range(50):  # the others would have come by now
                await asyncio.sleep(0)
            assert len(worker.submits) == 1
        await answer(worker, submit)

    decode = ScriptedWorker("d0", script=one_first)
    async with routing(tokenizer, decode) as router:
        asked = of_length(request(8, n=3), 128)
        result = await collect(stream(router, asked))
        assert result.tokens == dict.fromkeys(range(3), greedy(asked.prompt.tolist(), 8))
        assert (submitted[0], sorted(submitted)) == (0, [0, 1, 2])
        router.check_idle()


async def test_a_first_choice_that_fails_keeps_no_other_waiting(tokenizer: Tokenizer) -> None:
    async def refuses(worker: ScriptedWorker, submit: Submit) -> None:
        failure = Failure("refused", "no", retryable=False, worker_id="d0")
        worker.send(Delta(submit.request_id, failure=failure))

    async with routing(tokenizer, ScriptedWorker("d0", script=refuses)) as router:
        with fails_with(InvalidRequestError, "refused it: no"):
            await collect(stream(router, of_length(request(8, n=3), 128)))
        router.check_idle()


async def test_a_grammar_that_no_worker_can_follow_is_refused_and_no_worker_is_lost(tokenizer: Tokenizer) -> None:
    async def fails_later(worker: ScriptedWorker, submit: Submit) -> None:
        worker.send(Delta(submit.request_id, token_ids=[50], prompt_counts=TokenCounts()))
        failure = Failure("invalid", "the grammar cannot be followed", retryable=False, worker_id="d0")
        worker.send(Delta(submit.request_id, failure=failure))

    workers = [ScriptedWorker(name, script=fails_later) for name in ("d0", "d1")]
    async with routing(tokenizer, *workers) as router:
        with pytest.raises(InvalidRequestError, match="cannot be followed") as refusal:
            await collect(stream(router, replace(request(8), grammar_field="guided_regex")))
        assert refusal.value.field == "guided_regex"
        assert router.metrics.failovers == 0
        assert sum(len(worker.submits) for worker in workers) == 1
        router.check_idle()


async def test_a_worker_that_scores_half_a_prompt_breaks_the_protocol(tokenizer: Tokenizer) -> None:
    async def half(worker: ScriptedWorker, submit: Submit) -> None:
        told = PromptLogprobs(0, bytes(8), bytes(8), b"", b"")
        worker.send(Delta(submit.request_id, token_ids=[50], prompt_counts=TokenCounts(), prompt_logprobs=told))

    asked = request(8)
    sampling = (replace(asked.sampling[0], prompt_logprobs=0),)
    async with routing(tokenizer, ScriptedWorker("d0", script=half)) as router:
        with fails_with(ProtocolError, "no log-probabilities of the prompt, or not all of them"):
            await collect(stream(router, replace(asked, sampling=sampling)))
        router.check_idle()


async def test_a_stop_string_ends_the_choice_on_the_worker_too(tokenizer: Tokenizer) -> None:
    async def endless(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, 12)  # and it would go on

    full = text_of(tokenizer, greedy(PROMPT, 12))
    stop = full[4:7]
    decode = ScriptedWorker("d0", script=endless)
    async with routing(tokenizer, decode) as router:
        result = await collect(stream(router, request(100, stop=(stop,))))
        assert result.texts[0] == full[: full.index(stop)]
        assert result.reasons == {0: "stop"}
        assert result.tokens[0] == greedy(PROMPT, len(result.tokens[0]))
        await decode.until(lambda: decode.cancels == [decode.submits[0].request_id])
        router.check_idle()


async def test_an_eos_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        worker.send(Delta(submit.request_id, token_ids=[60], prompt_counts=TokenCounts()))
        worker.send(Delta(submit.request_id, token_ids=[61, 2], finish="stop", stop_token=2))

    async with routing(tokenizer, ScriptedWorker("d0", script=script)) as router:
        result = await collect(stream(router, request(100)))
        assert result.tokens == {0: [60, 61, 2]}
        assert result.texts == {0: text_of(tokenizer, [60, 61])}
        assert result.reasons == {0: "stop"}


async def test_the_deadline_ends_a_request_that_hangs(tokenizer: Tokenizer, clock: Clock) -> None:
    async def hang(worker: ScriptedWorker, submit: Submit) -> None:
        clock.now_s += 0.2

    decode = ScriptedWorker("d0", script=hang)
    async with routing(tokenizer, decode) as router:
        with fails_with(DeadlineError, "did not finish within 0.1 s"):
            await collect(stream(router, request(timeout_s=0.1)))
        assert decode.submits[0].timeout_s == pytest.approx(0.1)
        await decode.until(lambda: len(decode.cancels) == 1)
        router.check_idle()


async def test_the_deadline_holds_in_the_queue_too(tokenizer: Tokenizer, clock: Clock) -> None:
    async with routing(tokenizer, config=replace(CONFIG, no_worker_timeout_s=5.0)) as router:
        waiting = asyncio.create_task(collect(stream(router, request(timeout_s=0.1))))
        while not router.queue.view()[0]:
            await asyncio.sleep(0)
        clock.now_s += 0.2
        with fails_with(DeadlineError, "did not finish within 0.1 s"):
            await waiting
        router.check_idle()


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_stream_cancels_everywhere(tokenizer: Tokenizer, n: int) -> None:
    async def some(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, 2)

    decode = ScriptedWorker("d0", script=some)
    async with routing(tokenizer, decode) as router:
        async with aclosing(stream(router, request(100, n=n))) as pieces:
            async for _ in pieces:
                break
        router.check_idle()
        await decode.until(lambda: len(decode.cancels) == len(decode.submits))
        assert set(decode.cancels) == {submit.request_id for submit in decode.submits}


@pytest.mark.parametrize("n", [1, 3])
async def test_a_reader_that_pauses_stops_its_sequences_and_gets_the_same_tokens_when_it_reads_on(
    tokenizer: Tokenizer, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ScriptedWorker("d0")
    monkeypatch.setattr(choice, "MAX_ATTEMPTS", 1)  # a pause is no failed attempt
    async with routing(tokenizer, decode) as router:
        asked = request(1200, n=n)
        async with aclosing(stream(router, asked)) as pieces:
            first = await anext(pieces)
            await decode.until(lambda: len(decode.cancels) == n)  # paused: nobody has read
            assert set(decode.cancels) == {submit.request_id for submit in decode.submits}
            (worker,) = router.pool.workers.values()
            assert worker.link.in_flight == 0
            assert router.ledger.view(worker.key) == LoadView(0, 0, 0)

            async def rest() -> AsyncIterator[Piece | Finished]:
                yield first
                async for piece in pieces:
                    yield piece

            result = await collect(rest())
        assert result.tokens == dict.fromkeys(range(n), greedy(PROMPT, 1200))
        assert result.texts == dict.fromkeys(range(n), text_of(tokenizer, greedy(PROMPT, 1200)))
        assert result.reasons == dict.fromkeys(range(n), "length")
        router.check_idle()


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_the_reader_cancels_everywhere(tokenizer: Tokenizer, n: int) -> None:
    decode = ScriptedWorker("d0", script=silent)
    async with routing(tokenizer, decode) as router:
        reader = asyncio.create_task(collect(stream(router, request(100, n=n))))
        await decode.until(lambda: len(decode.submits) == n)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await decode.until(lambda: len(decode.cancels) == n)
        router.check_idle()
        assert 'outcome="cancelled"} 1.0' in router.metrics.exposition().decode()


async def test_one_failing_choice_ends_the_others(tokenizer: Tokenizer) -> None:
    broken = Failure("internal", "broken", retryable=False, worker_id="d0")
    decode = ScriptedWorker("d0", script=steps_of(silent, then_fail(1, broken), silent))
    async with routing(tokenizer, decode) as router:
        with fails_with(ProtocolError, "broken"):
            await collect(stream(router, request(100, n=3)))
        await decode.until(lambda: len(decode.cancels) == 2)
        router.check_idle()


async def test_draining_finishes_what_runs_and_refuses_what_comes(tokenizer: Tokenizer) -> None:
    proceed = asyncio.Event()

    async def when_told(worker: ScriptedWorker, submit: Submit) -> None:
        await proceed.wait()
        await answer(worker, submit)

    decode = ScriptedWorker("d0", script=when_told)
    async with routing(tokenizer, decode) as router:
        running = asyncio.create_task(collect(stream(router, request(5))))
        await decode.until(lambda: len(decode.submits) == 1)
        assert await router.generator.drain(0.05) == 1
        draining = asyncio.create_task(router.generator.drain(5.0))
        with fails_with(UnavailableError, "draining"):
            await collect(stream(router, request()))
        proceed.set()
        assert await draining == 0
        assert (await running).tokens == {0: greedy(PROMPT, 5)}
        assert router.generator.not_ready() == "the router is draining"


async def test_an_answer_that_is_cut_off_ends_with_what_to_do_and_holds_nothing(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("d0", script=then_hang(3))) as router:
        async with aclosing(stream(router, request(5))) as pieces:
            await anext(pieces)
            router.generator.cut_off()
            with fails_with(RouterLeavesError, "the next one goes on with the answer"):
                await collect(pieces)
        router.check_idle()


async def test_requests_with_a_new_prefix_follow_the_first_one_and_stop_when_it_is_cancelled(
    tokenizer: Tokenizer, clock: Clock
) -> None:
    """No event comes from any of the four prefill workers. Computing the prefix takes three times a step's floor."""
    prefill = [ScriptedWorker(f"p{number}", "prefill") for number in range(4)]
    decode = ScriptedWorker("d0", script=silent)
    prompt = np.arange(900, dtype=np.uint32) % VOCAB_SIZE
    async with routing(tokenizer, *prefill, decode) as router:
        tasks = [asyncio.create_task(collect(stream(router, replace(request(10), prompt=prompt)))) for _ in range(3)]
        await decode.until(lambda: len(decode.submits) == 3)
        chosen = [submit.prefill.worker_id for submit in decode.submits if submit.prefill is not None]
        assert len(chosen) == 3
        assert len(set(chosen)) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert router.expected.count == 0
        router.check_idle()


async def test_prompt_and_output_are_charged_to_the_callers_account_however_the_request_ends(
    tokenizer: Tokenizer,
) -> None:
    charged: list[int] = []

    class Ledger(Account):
        def spend(self, tokens: int) -> None:
            charged.append(tokens)

    account = Ledger(ANYONE, time.monotonic)
    seen = 0
    async with routing(tokenizer, ScriptedWorker("d0", script=then_hang(3))) as router:
        async with aclosing(stream(router, replace(request(10), account=account))) as pieces:
            async for piece in pieces:
                assert isinstance(piece, Piece)
                seen += len(piece.token_ids)
                if seen == 3:
                    break
        assert charged == [len(PROMPT), 3]
    charged.clear()
    async with routing(tokenizer, ScriptedWorker("d0")) as router:
        await collect(stream(router, replace(request(8, n=2), account=account)))
    assert charged == [len(PROMPT), 16]


async def test_a_choice_is_gone_when_it_has_ended_without_a_collection(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = weakref.WeakSet[Choice]()
    made = Choice.__init__

    def remembered(self: Choice, *parts: Any) -> None:
        made(self, *parts)
        choices.add(self)

    monkeypatch.setattr(Choice, "__init__", remembered)
    prefill, decode = ScriptedWorker("p0", "prefill"), ScriptedWorker("d0")
    async with routing(tokenizer, prefill, decode) as router:
        gc.collect()
        gc.disable()
        try:
            await collect(stream(router, request(3, n=4)))
            assert len(decode.submits) == 4
            assert not choices
        finally:
            gc.enable()
