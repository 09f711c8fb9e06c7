"""`baton plan` as text: the last observation and decision, with reasons, and the effects in flight."""

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.cli.terminal.output import print_table
from baton_proto.planner import DECODE, ROLES, Observation, Role, State, Target
from baton_proto.planner_control import Plan
from planner.policy.observation import gpus_held

STATES: tuple[State, ...] = ("ready", "starting", "draining", "sleeping")


def show_plan(out: Console, plan: Plan) -> None:
    if plan.observation is None or plan.target is None or plan.age_s is None:
        out.print(f"the planner has decided nothing yet{_because(plan.problem)}")
        return
    show_decision(out, plan.observation, plan.target, f"{plan.target.policy}, decided {plan.age_s:.1f} s ago")
    if plan.problem:
        out.print(f"[bold red]nothing new is seen[/]: {escape(plan.problem)}")
    if by_hand := plan.holds.sentence():
        out.print(f"set by hand: {by_hand}; `baton scale --release` takes it back")
    for effect in plan.effects:
        out.print(f"under way: {effect.verb} {effect.worker_id} ({effect.role}), {effect.running_s:.1f} s")


def show_decision(out: Console, observation: Observation, target: Target, title: str) -> None:
    print_table(out, _workers(observation, target, title))
    queue, interval = observation.queue, observation.interval
    rate = interval.arrivals / interval.duration_s
    waits = f"{queue.waiting} wait" + (f", the first for {queue.oldest_s:.1f} s" if queue.waiting else "")
    latency = f"P90 TTFT {_ms(interval.ttft_p90_ms)}, P90 ITL {_ms(interval.itl_p90_ms)}"
    out.print(f"{rate:.1f} requests/s over {interval.duration_s:.0f} s, {waits}; {latency}")
    if observation.gpu_share is not None:
        held, most = gpus_held(observation), f"{observation.gpu_share} of {observation.gpu_budget}"
        out.print(f"{held} GPUs held; {most} may be, beside the other models'")
    if target.frozen:
        out.print("[bold red]frozen[/]")
    for reason in target.reasons:
        out.print(f"- {escape(reason)}")
    for action in target.actions:
        out.print(f"-> {action.verb} {action.worker_id} ({action.role}): {escape(action.reason)}")


def _workers(observation: Observation, target: Target, title: str) -> Table:
    table = Table("role", title=title)
    for header in ("wanted", *STATES, "running", "waiting", "KV load"):
        table.add_column(header, justify="right")
    for role, wanted in zip(ROLES, (target.prefill, target.decode), strict=True):
        table.add_row(role, str(wanted), *_row(observation, role))
    return table


def _row(observation: Observation, role: Role) -> list[str]:
    workers = [worker for worker in observation.workers if worker.role == role]
    states = Counter(worker.state for worker in workers)
    ready = [worker.kv_used for worker in workers if worker.state == "ready"]
    kv_load = f"{sum(ready) / len(ready):.0%}" if ready and role == DECODE else ""
    in_all = (sum(worker.running for worker in workers), sum(worker.waiting for worker in workers))
    return [*(str(states[state] or "") for state in STATES), *map(str, in_all), kv_load]


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _because(problem: str) -> str:
    return f": {escape(problem)}" if problem else ""
