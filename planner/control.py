"""Answers operators' questions and orders to a running planner over NATS, see proto/baton_proto/planner_control.py."""

import time
from collections.abc import Callable, Sequence

import structlog
from msgspec.structs import replace

from baton_proto.planner import DECODE, OTHER_ROLE, PREFILL, ROLES, Action, Holds, Observation, Role, WorkerView
from baton_proto.planner_control import (
    MAJOR,
    Answer,
    Done,
    InFlight,
    Order,
    Plan,
    Question,
    Release,
    Scale,
    ShowPlan,
    decode_question,
    encode,
)
from planner.acting.hand import Hand
from planner.journal import Line, Ordered
from planner.loop import PlannerLoop
from planner.policy.observation import counts, gpus_of_role
from runtime.calls.over_nats import answered
from runtime.errors import InvalidRequestError
from runtime.security.proven_orders import ProvenOrders
from runtime.security.secret import Secret

BY_HAND = "ordered by hand"

log = structlog.get_logger()


class Control:
    """`operators`: keys, one of which an order has to prove; without any, all orders are taken."""

    def __init__(
        self,
        loop: PlannerLoop,
        hand: Hand,
        metrics_address: str,
        operators: Sequence[Secret] = (),
        write: Callable[[Line], None] = lambda line: None,
    ) -> None:
        """`write` puts a line into the journal."""
        self._loop = loop
        self._hand = hand
        self._metrics_address = metrics_address
        self._proven = ProvenOrders("planner", operators)
        self._write = write

    async def answer(self, data: bytes) -> bytes:
        return encode(Answer(MAJOR, await answered("planner", data, decode_question, self._answer)))

    async def _answer(self, question: Question) -> Plan | Done:
        if not isinstance(question.body, ShowPlan):
            self._check_key(question.body, question.proof)
        match question.body:
            case ShowPlan():
                return self._plan()
            case Scale(prefill, decode):
                holds = self._hand.holds()
                prefill = holds.prefill if prefill is None else prefill
                decode = holds.decode if decode is None else decode
                self._check_limits(Holds(prefill, decode).counts())
                await self._hand.set(prefill, decode)
                return Done(
                    f"set by hand: {self._hand.holds().sentence() or 'nothing'}; `baton scale --release` takes it back"
                )
            case Release():
                await self._hand.set(None, None)
                return Done("the planner decides alone")
            case Order():
                return await self._order(question.body)

    def _check_key(self, order: Scale | Release | Order, proof: str) -> None:
        """Raises InvalidRequestError."""
        by = self._proven.check(order, proof)
        log.info("an operator orders", order=type(order).__name__, by=by)
        self._write(Ordered(time.time(), order, by))

    def _check_limits(self, wanted: dict[Role, int]) -> None:
        """Raises InvalidRequestError for counts that the planner's guards would change."""
        limits = self._loop.config.limits
        least: dict[Role, int] = {PREFILL: limits.min_prefill, DECODE: limits.min_decode}
        most: dict[Role, int] = {PREFILL: limits.max_prefill, DECODE: limits.max_decode}
        for role, count in wanted.items():
            if not least[role] <= count <= most[role]:
                bounds = f"planner.limits allow {least[role]} to {most[role]} ({role}), see serving.yaml"
                raise InvalidRequestError(role, f"{count} workers cannot be: {bounds}")
        if self._loop.last is not None:
            now = self._loop.last.observation
            gpus = {role: gpus_of_role(now, role) * count for role, count in (least | wanted).items()}
            if sum(gpus.values()) > now.gpu_budget:
                takes = " and ".join(f"{count} for {role}" for role, count in gpus.items())
                problem = f"{now.gpu_budget} GPUs are the budget, and this takes {takes}"
                raise InvalidRequestError("planner.limits.gpu_budget", problem)

    async def _order(self, order: Order) -> Done:
        """Begins a drain or a flip. A flip also sets the resulting counts by hand, because the policy would otherwise
        flip a worker back. Raises InvalidRequestError."""
        if why := self._loop.held():
            raise InvalidRequestError("planner", f"{why}: ask again when it has ended")
        worker = self._worker(order.worker_id)
        if worker.role == DECODE and counts(self._observed(), DECODE).serving == 1:
            problem = f"{worker.worker_id} is the only decode worker that serves: `baton scale decode=2` first"
            raise InvalidRequestError("worker", problem)
        if order.verb == "drain":
            self._begin(Action("drain", worker.worker_id, worker.role, BY_HAND))
            return Done(f"{worker.worker_id} drains; `baton plan` shows how far it is")
        role = OTHER_ROLE[worker.role]
        now, holds = self._observed(), self._hand.holds()
        change = {role: 1, worker.role: -1}
        wanted = {one: counts(now, one).have + change[one] for one in ROLES}
        for one, held in holds.counts().items():
            wanted[one] = max(0, held + change[one])
        await self._hand.set(wanted[PREFILL], wanted[DECODE])
        self._begin(Action("flip", worker.worker_id, role, BY_HAND))
        by_hand = f"set by hand: {self._hand.holds().sentence() or 'nothing'}"
        return Done(f"{worker.worker_id} drains and turns into a {role} worker; {by_hand}")

    def _begin(self, action: Action) -> None:
        log.info("ordered by hand", verb=action.verb, worker=action.worker_id, role=action.role)
        self._loop.effects.begin([action])

    def _observed(self) -> Observation:
        """The observation of the last decision. Raises InvalidRequestError before the first one."""
        if self._loop.last is None:
            raise InvalidRequestError("planner", f"has not seen the service yet{_because(self._loop.problem)}")
        return self._loop.last.observation

    def _worker(self, worker_id: str) -> WorkerView:
        """Raises InvalidRequestError when the worker is unknown, not ready, or has an effect in flight."""
        known = self._observed().workers
        found = next((worker for worker in known if worker.worker_id == worker_id), None)
        if found is None:
            names = ", ".join(worker.worker_id for worker in known) or "none"
            raise InvalidRequestError("worker", f"{worker_id!r} is not known; the planner sees: {names}")
        running = self._loop.effects.running.get(worker_id)
        doing = running[0].verb if running is not None else found.effect
        if doing is not None or found.state != "ready":
            raise InvalidRequestError("worker", f"{worker_id} cannot be changed now: {doing or found.state}")
        return found

    def _plan(self) -> Plan:
        last, now_s = self._loop.last, time.time()
        effects = [
            InFlight(action.verb, action.worker_id, action.role, now_s - began_s)
            for action, began_s in self._loop.effects.running.values()
        ]
        return Plan(
            None if last is None else now_s - last.time_s,
            None if last is None else replace(last.observation, steps=[]),
            None if last is None else last.target,
            effects,
            self._hand.holds(),
            self._loop.problem,
            self._metrics_address,
            self._proven.challenge,
        )


def _because(problem: str) -> str:
    return f": {problem}" if problem else ""
