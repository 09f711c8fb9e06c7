"""What a live planner makes of what goes wrong: its own end, workers that die or hang, NATS away."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from baton_proto.generated import inference_pb2 as pb
from baton_proto.planner import PREFILL
from baton_proto.planner_control import Order, Release, Scale
from tests.planner.live import Planned, planned_service
from tests.spine.worker_view import until_running

pytestmark = pytest.mark.slow

STALE_S = 3.0
OUTAGE_S = 10.0  # more than twice what a worker may be silent


async def test_a_planner_that_is_killed_in_mid_scaling_and_started_again_starts_nothing_twice(tmp_path: Path) -> None:
    async with planned_service(tmp_path, 1, 1, {}) as planned:
        await planned.tell(Scale(prefill=3, decode=2))
        await planned.until(lambda: len(begun(planned)) == 3)
        last = begun(planned)[-1]
        await until_living(planned, *begun(planned))
        planned.service.kill(last, signal.SIGSTOP)
        assert last not in [effect.worker_id for effect in planned.effects("add")], "it was not in mid-scaling"
        await planned.kill_planner()
        processes = set(planned.service.supervisor.children)
        planned.service.kill(last, signal.SIGCONT)
        await planned.start_planner()
        await planned.until(lambda: planned.count() == (3, 2))
        assert set(planned.service.supervisor.children) == processes
        assert len(begun(planned)) == 3


async def test_a_worker_that_is_killed_during_its_drain_is_gone_and_its_request_ends_elsewhere(tmp_path: Path) -> None:
    async with planned_service(tmp_path, 1, 2, {}, mock={"answer_tokens": 10_000}) as planned:
        sampling = pb.SamplingOptions(max_tokens=1000)
        requests = [
            asyncio.create_task(
                planned.service.client.generate(pb.GenerateRequest(text=f"{n}" * 40, sampling=sampling), timeout_s=60)
            )
            for n in range(4)
        ]
        for worker_id in ("decode-1", "decode-2"):
            await until_running(planned.service, worker_id)
        await planned.tell(Scale(prefill=1, decode=1))
        await planned.until(lambda: "draining" in [worker.state for worker in planned.last().observation.workers])
        (leaving,) = [w.worker_id for w in planned.last().observation.workers if w.state == "draining"]
        planned.service.kill(leaving)
        await planned.until(lambda: planned.count() == (1, 1))
        assert [effect.error for effect in planned.effects("drain")] == [""]
        assert begun(planned) == []
        answers = await asyncio.gather(*requests)
        assert [len(answer.token_ids) for answer in answers] == [1000] * 4
        assert max(answer.served_by[0].attempts for answer in answers) == 2


async def test_what_a_drain_does_not_finish_in_its_time_goes_on_elsewhere(tmp_path: Path) -> None:
    quick = {"workers": {"drain_timeout_s": 1.0}, "mock": {"answer_tokens": 10_000}}
    slow = {"decode_floor_ms": 15.0}
    constants = {"pace.DRAIN_DEADLINE_S": 14.0}
    async with planned_service(tmp_path, 1, 2, {}, constants=constants, step_times=slow, **quick) as planned:
        asking = pb.GenerateRequest(text="a long answer", sampling=pb.SamplingOptions(max_tokens=800))
        request = asyncio.create_task(planned.service.client.generate(asking, timeout_s=60))
        await planned.until(lambda: any(worker.running for worker in planned.last().observation.workers))
        (busy,) = [worker.worker_id for worker in planned.last().observation.workers if worker.running]
        await planned.tell(Order("drain", busy))
        await planned.until(lambda: bool(planned.effects("drain")))
        assert planned.effects("drain")[0].error == ""
        assert not request.done()
        assert len((answer := await request).token_ids) == 800
        assert answer.served_by[0].attempts == 2


async def test_a_worker_that_never_becomes_ready_is_given_up_with_a_reason_and_another_one_is_started(
    tmp_path: Path,
) -> None:
    async with planned_service(tmp_path, 1, 1, {"start_s": 2.0}, constants={"pace.RETRY_S": 1.0}) as planned:
        await planned.tell(Scale(prefill=2))
        await planned.until(lambda: len(begun(planned)) == 1)
        (stuck,) = begun(planned)
        await until_living(planned, stuck)
        planned.service.kill(stuck, signal.SIGSTOP)
        # It may have said that it starts before it was stopped, which ends the effect.
        given_up = "was not done with add after 10 s", "was not ready by its deadline"
        await planned.until(lambda: any(reason_in(planned, reason) for reason in given_up))
        await planned.until(lambda: planned.count() == (2, 1))
        assert stuck not in planned.ready(PREFILL)
        assert [effect.worker_id for effect in planned.effects("remove")] == [stuck]
        assert not planned.service.supervisor.children.living(stuck)


async def test_while_nats_is_away_for_long_the_service_serves_and_the_planner_freezes_and_says_so(
    tmp_path: Path,
) -> None:
    settings = {"limits": {"min_prefill": 2}}
    async with planned_service(tmp_path, 2, 1, settings, constants={"pace.STALE_S": STALE_S}) as planned:
        await planned.until(lambda: planned.count() == (2, 1))
        await planned.service.nats.stop()
        away_s = time.monotonic()
        await planned.until(lambda: planned.last().target.frozen)
        planned.service.kill("prefill-2")
        (reason,) = planned.last().target.reasons
        assert reason.startswith("nothing was heard from routers")
        assert reason.endswith("for more than 3 s: all stays as it is")
        while time.monotonic() < away_s + OUTAGE_S:
            answer = await planned.service.client.generate(pb.GenerateRequest(text="still there?"), timeout_s=60)
            assert answer.token_ids
            await asyncio.sleep(1)
        assert planned.last().target.frozen
        assert begun(planned) == []
        await planned.service.nats.start()
        await planned.until(lambda: len(begun(planned)) == 1 and planned.count() == (2, 1))
        assert not planned.last().target.frozen


async def test_an_operators_counts_hold_until_they_are_released(tmp_path: Path) -> None:
    async with planned_service(tmp_path, 1, 1, {}, constants={"slo.DOWN_AFTER_S": 1.0}) as planned:
        said = await planned.tell(Scale(decode=2))
        assert said == "set by hand: decode 2; `baton scale --release` takes it back"
        await planned.until(lambda: planned.count() == (1, 2))
        reasons = [reason for decision in planned.decisions() for reason in decision.target.reasons]
        assert "2 decode workers are set by hand; 1 were wanted" in reasons
        assert await planned.tell(Release()) == "the planner decides alone"
        await planned.until(lambda: planned.count() == (1, 1))


async def until_living(planned: Planned, *worker_ids: str) -> None:
    """Polls in every turn of the event loop, so that the processes have not done anything yet."""
    async with asyncio.timeout(60):
        while any(planned.service.supervisor.children.living(worker_id) is None for worker_id in worker_ids):
            await asyncio.sleep(0)


def begun(planned: Planned) -> list[str]:
    """Workers that it was decided to start."""
    actions = [action for decision in planned.decisions() for action in decision.target.actions]
    return [action.worker_id for action in actions if action.verb == "add"]


def reason_in(planned: Planned, text: str) -> bool:
    targets = [decision.target for decision in planned.decisions()]
    told = [reason for target in targets for reason in (*target.reasons, *(each.reason for each in target.actions))]
    return any(text in reason for reason in told)
