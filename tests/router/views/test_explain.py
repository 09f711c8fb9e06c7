"""Explanations: every candidate with terms that add up, of requests in the past and of prompts that were only asked
about, and nothing is charged for an answer."""

import random
from collections import Counter

import numpy as np
import pytest

from baton_proto.discovery import LoadReport, WorkerLoad
from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import Failure
from router.placement.assignment import Assigner
from router.placement.cost import NO_ROOM
from router.placement.weights import Weights
from router.text.tokenizer import Tokenizer
from router.views.explain import Explainer
from router.workers.account import LoadView
from runtime.config.serving import RouterConfig
from runtime.config.step_times import StepTimes
from runtime.discovery.directory import Change
from tests.router.operator_questions import NO_SIBLINGS
from tests.router.scripted_worker import ScriptedWorker, answer, steps_of
from tests.router.small_router import CONFIG, PROMPT, Holdings, Router, collect, request, routing, stream, then_fail


def explainer(router: Router, config: RouterConfig = CONFIG, **cached: int) -> Explainer:
    """With workers that hold so many blocks of every prompt."""
    holdings = Holdings({(worker_id, 1): blocks for worker_id, blocks in cached.items()})
    assigner = Assigner(router.pool, holdings, router.ledger, config, random.Random(1))
    return Explainer(
        assigner, router.generator._parts.decisions, router.metrics.recent, router.pool, config, 16, NO_SIBLINGS
    )


def prompt(num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.arange(num_tokens, dtype=np.uint32)


def by_worker(decision: pb.Decision) -> dict[str, pb.CandidateCost]:
    return {candidate.worker_id: candidate for candidate in decision.candidates}


def term(cost: pb.CandidateCost, name: str) -> float:
    (value,) = (term.value for term in cost.terms if term.name == name)
    return value


def load(router: Router, worker_id: str, **fields: int) -> None:
    router.pool.load_report(LoadReport(version=1, worker_id=worker_id, incarnation=1, load=WorkerLoad(**fields)))


async def test_a_request_of_the_past_is_explained_with_its_candidates(tokenizer: Tokenizer) -> None:
    async with routing(
        tokenizer, ScriptedWorker("p0", "prefill"), ScriptedWorker("d0"), ScriptedWorker("d1")
    ) as router:
        load(router, "d1", running=5)
        wanted = request(10)
        await collect(stream(router, wanted))
        response = explainer(router).request(wanted.request_id)
        assert response is not None
        (decision,) = response.decisions
        assert (decision.request_id, decision.choice, decision.attempt) == (wanted.request_id, 0, 1)
        assert (decision.num_tokens, decision.reason) == (len(PROMPT), pb.PLACEMENT_REASON_SHIPPED)
        assert (decision.decode_worker, decision.prefill_worker) == ("d0", "p0")
        weighed = by_worker(decision)
        assert [w for w, candidate in weighed.items() if candidate.chosen] == ["p0", "d0"]
        assert term(weighed["d1"], "decode") == pytest.approx(weighed["d1"].total - weighed["d0"].total)
        assert (decision.expected_ms, decision.took_ms > 0) == (weighed["d0"].ttft_ms, True)
        assert response.rules.local_prefill_tokens == 0


async def test_every_attempt_and_choice_is_explained(tokenizer: Tokenizer) -> None:
    fails_once = steps_of(then_fail(3, Failure("internal", "broke", True, "d0")), answer)
    async with routing(
        tokenizer, ScriptedWorker("d0", script=fails_once), ScriptedWorker("d1", script=answer)
    ) as router:
        load(router, "d1", blocks_used=50)
        wanted = request(10, n=2)
        await collect(stream(router, wanted))
        response = explainer(router).request(wanted.request_id)
        assert response is not None
        attempts = Counter(decision.choice for decision in response.decisions)
        assert sorted(attempts.values()) == [1, 2]
        again = next(decision for decision in response.decisions if decision.attempt == 2)
        assert again.num_tokens > len(PROMPT), "what the client has already is part of the prompt"
        assert by_worker(again)["d0"].barred == pb.BARRED_REASON_EXCLUDED
        assert again.decode_worker == "d1"


async def test_an_unknown_request_is_not_explained(tokenizer: Tokenizer) -> None:
    async with routing(tokenizer, ScriptedWorker("d0")) as router:
        assert explainer(router).request("nobody") is None


async def test_terms_add_up_to_the_cost(tokenizer: Tokenizer) -> None:
    config = RouterConfig(placement=Weights(local_prefill_tokens=100, delay_weight=0.0))
    workers = [
        ScriptedWorker("p0", "prefill"),
        ScriptedWorker("p1", "prefill"),
        ScriptedWorker("d0"),
        ScriptedWorker("d1"),
    ]
    async with routing(tokenizer, *workers) as router:
        for worker in workers:
            load(router, worker.worker_id)
            router.ledger.learn((worker.worker_id, 1), StepTimes(1.0, 0.1, 0.001, 4.0, 1.0, 0.0))
        load(router, "d0", running=2, blocks_used=7)
        (decision,) = explainer(router, config, p0=4, d0=8, d1=6).prompt(prompt(200)).decisions
        weighed = by_worker(decision)
        assert set(weighed) == {"p0", "p1", "d0", "d1"}
        for cost in weighed.values():
            assert cost.total == pytest.approx(sum(term.value for term in cost.terms)), cost.worker_id
        p0, d0, d1 = weighed["p0"], weighed["d0"], weighed["d1"]
        computed = 136 * 0.1 + 0.001 * (200**2 - 64**2) / 2
        assert (term(p0, "computed"), term(p0, "queued"), term(p0, "decode")) == pytest.approx((computed, 0.0, 0.0))
        assert (d0.runs_prompt, d0.uncached_tokens, term(d0, "decode")) == (True, 72, 8 * 6.0)
        assert term(d0, "computed") == pytest.approx(72 * 0.1 + 0.001 * (200**2 - 128**2) / 2)
        assert (d1.runs_prompt, d1.uncached_tokens, term(d1, "computed")) == (False, 104, 0.0)
        assert term(d1, "shipped") == pytest.approx(p0.ttft_ms + 2.0 + 104 * 0.0007)


async def test_asking_about_a_prompt_says_what_would_come_and_charges_nothing(tokenizer: Tokenizer) -> None:
    config = RouterConfig(placement=Weights(local_prefill_tokens=32))
    async with routing(tokenizer, ScriptedWorker("p0", "prefill"), ScriptedWorker("d0")) as router:
        short, long = (explainer(router, config).prompt(prompt(n)).decisions[0] for n in (32, 33))
        assert (short.reason, short.decode_worker, short.prefill_worker) == (pb.PLACEMENT_REASON_SHORT_PROMPT, "d0", "")
        assert (long.reason, long.decode_worker, long.prefill_worker) == (pb.PLACEMENT_REASON_SHIPPED, "d0", "p0")
        assert (short.request_id, by_worker(short)["d0"].chosen, by_worker(short)["p0"].chosen) == ("", True, False)
        for worker in router.pool.workers.values():
            assert router.ledger.view(worker.key) == LoadView(0, 0, 0)
        assert explainer(router).num_remembered == 0


async def test_a_prompt_is_explained_as_going_to_workers_of_one_form_of_kv(tokenizer: Tokenizer) -> None:
    workers = [ScriptedWorker(name, role) for name, role in (("p-old", "prefill"), ("d-old", "decode"))]
    workers += [ScriptedWorker(name, role) for name, role in (("p-new", "prefill"), ("d-new", "decode"))]
    for worker in workers:
        worker.kv_form = worker.worker_id.partition("-")[2]
    config = RouterConfig(placement=Weights(local_prefill_tokens=0))
    async with routing(tokenizer, *workers) as router:
        for busy, wanted in ((("p-old", "d-new"), None), (("p-old", "d-old"), "new"), (("p-new", "d-new"), "old")):
            charges = [router.ledger.charge("other", (name, 1), None, 400, 400) for name in busy]
            decision = explainer(router, config).prompt(prompt(40)).decisions[0]
            forms = {name.partition("-")[2] for name in (decision.prefill_worker, decision.decode_worker)}
            assert len(forms) == 1
            assert wanted is None or forms == {wanted}
            for charge in charges:
                charge.release()


async def test_what_keeps_a_prompt_waiting_is_said(tokenizer: Tokenizer) -> None:
    config = RouterConfig(max_running_per_worker=2, placement=Weights(local_prefill_tokens=0, prefill_queue_tokens=100))
    async with routing(tokenizer, ScriptedWorker("p0", "prefill"), ScriptedWorker("d0")) as router:
        load(router, "p0", queued_prefill_tokens=100)
        (decision,) = explainer(router, config).prompt(prompt(40)).decisions
        assert (decision.decode_worker, decision.reason) == (
            "",
            pb.PLACEMENT_REASON_WAITS_FOR_PREFILL_ROOM,
        )
        assert [by_worker(decision)[w].barred for w in ("p0", "d0")] == [
            pb.BARRED_REASON_QUEUE_FULL,
            pb.BARRED_REASON_PREFILL_FULL,
        ]
        assert {candidate.chance for candidate in decision.candidates} == {0.0}
        load(router, "d0", running=2)
        (decision,) = explainer(router, config).prompt(prompt(40)).decisions
        assert decision.reason == pb.PLACEMENT_REASON_WAITS_FOR_DECODE_ROOM
        assert by_worker(decision)["d0"].barred == NO_ROOM


async def test_a_prompt_that_a_decode_worker_runs_for_full_prefill_workers_says_so(tokenizer: Tokenizer) -> None:
    config = RouterConfig(placement=Weights(prefill_queue_tokens=100))
    async with routing(tokenizer, ScriptedWorker("p0", "prefill"), ScriptedWorker("d0")) as router:
        load(router, "p0", queued_prefill_tokens=100)
        response = explainer(router, config).prompt(prompt(40))
        (decision,) = response.decisions
        chosen = (decision.decode_worker, decision.prefill_worker, decision.reason)
        assert chosen == ("d0", "", pb.PLACEMENT_REASON_PREFILL_FULL)
        assert by_worker(decision)["d0"].runs_prompt


async def test_workers_that_cannot_be_used_are_named_with_the_reason(tokenizer: Tokenizer) -> None:
    draining, small = ScriptedWorker("d1"), ScriptedWorker("d2")
    small.max_model_len = 20
    async with routing(tokenizer, ScriptedWorker("d0"), draining, small) as router:
        router.pool.apply(Change("changed", draining.record("draining")))
        (decision,) = explainer(router).prompt(prompt(40)).decisions
        assert [(left.worker_id, left.reason, left.detail) for left in decision.left_out] == [
            ("d1", pb.LEFT_OUT_REASON_NOT_READY, "draining"),
            ("d2", pb.LEFT_OUT_REASON_TOO_SMALL, "20"),
        ]
        assert set(by_worker(decision)) == {"d0"}


async def test_a_request_that_found_a_worker_full_says_so(tokenizer: Tokenizer) -> None:
    config = RouterConfig(max_running_per_worker=1, placement=Weights(local_prefill_tokens=0))
    async with routing(tokenizer, ScriptedWorker("d0"), ScriptedWorker("d1"), config=config) as router:
        load(router, "d0", running=1)
        wanted = request(3)
        await collect(stream(router, wanted))
        response = explainer(router, config).request(wanted.request_id)
        assert response is not None
        (decision,) = response.decisions
        assert [by_worker(decision)[w].barred for w in ("d0", "d1")] == [NO_ROOM, pb.BARRED_REASON_UNSPECIFIED]
        assert decision.decode_worker == "d1"
