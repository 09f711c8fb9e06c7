"""Real worker processes with a tiny model, driven over gRPC as a router drives them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton_proto.worker import PrefillTarget
from runtime.config.serving import ServingConfig, TransferConfig
from runtime.config.step_times import StepTimes
from tests.worker.router_client import RouterClient
from tests.worker.worker_process import WorkerProcess, prompt, start_worker

# One event loop for all: gRPC's poller stumbles over loops that were closed.
pytestmark = pytest.mark.asyncio(loop_scope="session")


LENGTHS = [1, 2, 15, 16, 17, 33, 200]
LONG = 2000  # tokens: more than 30 steps


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_shipped_prompt_gives_the_tokens_of_a_local_one(
    transport: str, decode: WorkerProcess, prefill_shm: WorkerProcess, prefill_tcp: WorkerProcess
) -> None:
    prefill = {"shm": prefill_shm, "tcp": prefill_tcp}[transport]
    async with RouterClient(decode) as router:
        for length in LENGTHS:
            tokens = prompt(length, seed=length + (20_000 if transport == "tcp" else 10_000))
            shipped = await (await router.submit(tokens, prefill=prefill.target, max_tokens=20)).end()
            local = await (await router.submit(tokens, max_tokens=20)).end()
            assert (shipped.failure, shipped.finish, len(shipped.token_ids)) == (None, "length", 20)
            assert shipped.token_ids == local.token_ids
            assert shipped.handoff is not None
            assert local.handoff is None
            assert shipped.handoff.prefill_worker == prefill.worker_id
            assert shipped.handoff.transport == transport
            assert shipped.handoff.kv_blocks == -(-length // 16)
    await asyncio.gather(decode.until_idle(), prefill.until_idle())


async def test_many_at_once_local_and_shipped_do_not_disturb_each_other(
    decode: WorkerProcess, prefill_shm: WorkerProcess, prefill_tcp: WorkerProcess
) -> None:
    prompts = [prompt(20 + 13 * number, seed=100 + number) for number in range(12)]
    targets = [prefill_shm.target, prefill_tcp.target, None]
    async with RouterClient(decode) as router:
        answers = [
            await router.submit(tokens, prefill=targets[number % 3], max_tokens=12)
            for number, tokens in enumerate(prompts)
        ]
        together = [(await answer.end()).token_ids for answer in answers]
        alone = [(await (await router.submit(tokens, max_tokens=12)).end()).token_ids for tokens in prompts]
    assert together == alone
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle(), prefill_tcp.until_idle())


async def test_a_prefill_worker_keeps_answers_beside_the_prompts_that_it_ships(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    prompts = [prompt(20 + 37 * number, seed=500 + number) for number in range(8)]
    async with RouterClient(decode) as router, RouterClient(prefill_shm) as keeper:
        kept = [await keeper.submit(tokens, max_tokens=30) for tokens in prompts]
        shipped = [await router.submit(tokens, prefill=prefill_shm.target, max_tokens=30) for tokens in prompts]
        assert (await prefill_shm.inspect()).problems == []
        answers = [(await answer.end()).token_ids for answer in kept + shipped]
        alone = [(await (await router.submit(tokens, max_tokens=30)).end()).token_ids for tokens in prompts]
    assert answers == alone + alone
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())


async def test_a_first_token_leaves_when_its_kv_is_there_however_long_the_step_beside_it_is(
    config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    slow = msgspec.structs.replace(config, model="mock", step_times=StepTimes(decode_floor_ms=1500.0))
    decode, prefill = [await start_worker(role, f"{role}-slow", slow, folder) for role in ("decode", "prefill")]
    mortal += [decode, prefill]
    async with RouterClient(decode) as router:
        await (await router.submit(prompt(20, seed=1), max_tokens=9)).tokens(1)
        shipped = await (await router.submit(prompt(20, seed=2), prefill=prefill.target, max_tokens=2)).end()
        deltas = [delta for message in router.messages for delta in message.deltas]
    (told,) = [delta.timeline for delta in deltas if delta.request_id == shipped.request_id and delta.timeline]
    assert told.first_us - told.arrived_us < 500_000


async def test_a_cached_prefix_is_neither_computed_nor_shipped_again(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    shared, first, second = prompt(64, seed=200), prompt(20, seed=201), prompt(20, seed=202)
    async with RouterClient(decode) as router:
        cold = await (await router.submit(shared + first, prefill=prefill_shm.target)).end()
        warm = await (await router.submit(shared + second, prefill=prefill_shm.target)).end()
        local = await (await router.submit(shared + second)).end()
        again = await (await router.submit(shared + second, prefill=prefill_shm.target)).end()
    assert cold.handoff is not None
    assert warm.handoff is not None
    assert again.handoff is not None
    assert (cold.cached_tokens, cold.handoff.kv_blocks) == (0, 6)
    assert (warm.cached_tokens, warm.handoff.kv_blocks, warm.handoff.prompt_counts.cached_tokens) == (64, 2, 64)
    assert local.cached_tokens == 80
    assert (again.cached_tokens, again.handoff.kv_blocks) == (80, 1)
    assert warm.token_ids == local.token_ids == again.token_ids


async def test_requests_of_different_hash_seeds_share_no_block_on_either_worker(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    tokens = prompt(100, seed=205)
    async with RouterClient(decode) as router:
        for hash_seed in (7, 8):
            cold = await (await router.submit(tokens, prefill=prefill_shm.target, hash_seed=hash_seed)).end()
            warm = await (await router.submit(tokens, prefill=prefill_shm.target, hash_seed=hash_seed)).end()
            assert cold.handoff is not None
            assert warm.handoff is not None
            assert (cold.cached_tokens, cold.handoff.prompt_counts.cached_tokens, cold.handoff.kv_blocks) == (0, 0, 7)
            assert (warm.cached_tokens, warm.handoff.prompt_counts.cached_tokens, warm.handoff.kv_blocks) == (96, 96, 1)
            assert cold.token_ids == warm.token_ids


async def test_a_prefill_workers_own_cached_prefix_is_shipped(
    decode: WorkerProcess, prefill_shm: WorkerProcess, config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    """The other decode worker has nothing cached, the prefill worker has."""
    tokens = prompt(100, seed=210)
    other = await start_worker("decode", "decode-other", config, folder)
    mortal.append(other)
    async with RouterClient(decode) as router, RouterClient(other) as other_router:
        first = await (await router.submit(tokens, prefill=prefill_shm.target)).end()
        second = await (await other_router.submit(tokens, prefill=prefill_shm.target)).end()
    assert second.handoff is not None
    assert (second.handoff.kv_blocks, second.handoff.prompt_counts.cached_tokens, second.cached_tokens) == (7, 96, 96)
    assert second.token_ids == first.token_ids


async def test_the_first_token_may_be_the_last(decode: WorkerProcess, prefill_shm: WorkerProcess) -> None:
    tokens = prompt(40, seed=220)
    async with RouterClient(decode) as router:
        by_length = await (await router.submit(tokens, prefill=prefill_shm.target, max_tokens=1)).end()
        assert (by_length.finish, len(by_length.token_ids)) == ("length", 1)
        stop = by_length.token_ids[0]
        by_stop = await (await router.submit(tokens, prefill=prefill_shm.target, stop_token_ids=(stop,))).end()
        assert (by_stop.finish, by_stop.token_ids) == ("stop", [stop])
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())


async def test_a_replay_goes_on_where_the_first_attempt_stopped(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    tokens = prompt(50, seed=230)
    sampling = {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.2, "logprobs": 2}
    async with RouterClient(decode) as router:
        whole = await (await router.submit(tokens, max_tokens=16, **sampling)).end()
        for target in (None, prefill_shm.target):
            known = whole.token_ids[:6]
            rest = await (
                await router.submit(tokens + known, num_prompt_tokens=50, max_tokens=16, prefill=target, **sampling)
            ).end()
            assert known + rest.token_ids == whole.token_ids
            assert len(rest.logprobs) == len(rest.token_ids)
            assert rest.finish == "length"


async def test_cancel_frees_the_blocks_of_both_workers(decode: WorkerProcess, prefill_shm: WorkerProcess) -> None:
    async with RouterClient(decode) as router:
        decoding = await router.submit(prompt(40, seed=240), max_tokens=3000)
        await decoding.tokens(3)
        prefilling = await router.submit(prompt(LONG, seed=241), prefill=prefill_shm.target)
        await prefill_shm.until("running the prompt", lambda report: report.load.running == 1)
        assert (await decode.inspect()).load.leases == 1
        await router.cancel(decoding)
        await router.cancel(prefilling)
        assert (await decoding.end()).finish == "cancelled"
        assert (await prefilling.end()).finish == "cancelled"
        await asyncio.gather(decode.until_idle(1), prefill_shm.until_idle(1))


async def test_a_router_that_leaves_frees_the_blocks_of_both_workers(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    async with RouterClient(decode) as router:
        decoding = await router.submit(prompt(40, seed=250), max_tokens=3000)
        await decoding.tokens(1)
        await router.submit(prompt(LONG, seed=251), prefill=prefill_shm.target)
        await prefill_shm.until("running the prompt", lambda report: report.load.running == 1)
        await router.break_stream()
        await asyncio.gather(decode.until_idle(1), prefill_shm.until_idle(1))


@pytest.mark.parametrize("shipped", [False, True])
async def test_a_request_out_of_time_fails_and_is_freed(
    shipped: bool, decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    target = prefill_shm.target if shipped else None
    async with RouterClient(decode) as router:
        answer = await router.submit(prompt(LONG, seed=260), prefill=target, max_tokens=2000, timeout_s=0.1)
        failure = (await answer.end()).failure
        assert failure is not None
        assert (failure.code, failure.retryable) == ("deadline", False)
        await asyncio.gather(decode.until_idle(1), prefill_shm.until_idle(1))


async def test_an_unreachable_prefill_worker_is_reported_promptly(decode: WorkerProcess) -> None:
    nobody = PrefillTarget("prefill-gone", 1, "127.0.0.1:1")
    async with RouterClient(decode) as router:
        answer = await (await router.submit(prompt(40, seed=270), prefill=nobody)).end()
        assert answer.failure is not None
        failure = answer.failure
        assert (failure.code, failure.retryable, failure.worker_id) == ("prefill_failed", True, "prefill-gone")
        await decode.until_idle(1)


async def test_a_prefill_worker_that_was_restarted_refuses_its_former_incarnations_requests(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    target = prefill_shm.target
    former = PrefillTarget(target.worker_id, target.incarnation - 1, target.stream_address)
    async with RouterClient(decode) as router:
        answer = await (await router.submit(prompt(40, seed=280), prefill=former)).end()
    assert answer.failure is not None
    assert answer.failure.code == "prefill_failed"
    assert f"not {former.incarnation}" in answer.failure.message


async def test_a_prefill_worker_killed_in_mid_prompt_is_reported_and_the_replay_is_exact(
    decode: WorkerProcess, config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    victim = await start_worker("prefill", "prefill-victim", config, folder)
    mortal.append(victim)
    tokens = prompt(LONG, seed=290)
    async with RouterClient(decode) as router:
        answer = await router.submit(tokens, prefill=victim.target, request_id="killed")
        await victim.until("in mid-prompt", lambda report: 0 < report.load.queued_prefill_tokens < LONG - 200)
        victim.kill()
        await answer.end()
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.retryable, answer.failure.worker_id) == (
            "prefill_lost",
            True,
            "prefill-victim",
        )
        await decode.until_idle(3)
        replay = await (await router.submit(tokens, request_id="killed")).end()  # the same id on the same worker
        assert replay.failure is None
        again = await (await router.submit(tokens)).end()
        assert replay.token_ids == again.token_ids


async def test_prompts_wait_for_blocks_in_the_order_of_arrival(
    decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    """The pool holds 512 blocks; six prompts of 125 blocks do not fit together. One of them gives up waiting."""
    async with RouterClient(decode) as router:
        prompts = [prompt(LONG, seed=300 + number) for number in range(6)]
        answers = [await router.submit(tokens, prefill=prefill_shm.target, max_tokens=4) for tokens in prompts]
        impatient = answers.pop()
        await router.cancel(impatient)
        assert (await impatient.end()).finish == "cancelled"
        order = [await answer for answer in asyncio.as_completed([answer.end() for answer in answers])]
    assert order == answers
    assert all(answer.finish == "length" for answer in answers)
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())


async def test_an_expired_lease_leaves_both_workers_clean(
    prefill_shm: WorkerProcess, config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    hasty = msgspec.structs.replace(config, transfer=TransferConfig(lease_ttl_s=0.02))
    victim = await start_worker("decode", "decode-victim", hasty, folder)
    mortal.append(victim)
    async with RouterClient(victim) as router:
        expired = await (await router.submit(prompt(LONG, seed=330), prefill=prefill_shm.target)).end()
        assert expired.failure is not None
        assert expired.failure.retryable
        assert expired.failure.code in ("prefill_lost", "prefill_failed"), "by who was faster to say it"
        await asyncio.gather(victim.until_idle(3), prefill_shm.until_idle(3))


async def test_a_killed_decode_worker_leaves_the_prefill_worker_clean(
    prefill_shm: WorkerProcess, config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    victim = await start_worker("decode", "decode-killed", config, folder)
    mortal.append(victim)
    async with RouterClient(victim) as router:
        await router.submit(prompt(LONG, seed=331), prefill=prefill_shm.target)
        await prefill_shm.until("in mid-prompt", lambda report: 0 < report.load.queued_prefill_tokens < LONG - 200)
        victim.kill()
        await prefill_shm.until_idle(3)


async def test_what_cannot_fit_is_refused(decode: WorkerProcess) -> None:
    async with RouterClient(decode) as router:
        answer = await (await router.submit(prompt(4000, seed=310), max_tokens=97)).end()
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.retryable) == ("refused", False)
    assert "4096" in answer.failure.message


async def test_one_message_per_step_carries_all_sequences_and_the_load(decode: WorkerProcess) -> None:
    async with RouterClient(decode) as router:
        answers = [await router.submit(prompt(10, seed=320 + number), max_tokens=100) for number in range(4)]
        for answer in answers:
            await answer.end()
        carrying = [message for message in router.messages if message.deltas]
        assert sum(len(delta.token_ids) for message in carrying for delta in message.deltas) == 400
        assert len(carrying) <= 110  # 100 steps, and a few more for the prompts
        assert all(len({delta.request_id for delta in message.deltas}) == len(message.deltas) for message in carrying)
        assert all(message.load.blocks_total == 512 for message in carrying)
        assert max(message.load.running for message in router.messages) == 4
