"""`baton events explain`: shows all candidate workers of a request with the terms of their costs, why one
won, and what the request passed when."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from baton.cli.terminal import options
from baton.cli.terminal.asking import OperatorsRouter
from baton.cli.terminal.output import console, counted, human_bytes, print_table
from baton.cli.terminal.token_list import token_ids
from baton_proto.generated import inference_pb2 as pb
from baton_proto.placement_words import BARRED, LEFT_OUT, REASONS
from runtime.calls.answer import message_fields

TIERS = ("host", "disk")  # terms that are shown where a candidate has one


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="[REQUEST_ID]", help="Of a request that was placed lately.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Where would this text go now?")
    ] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", metavar="QUESTION", help="Where would this question go, as `baton chat`?")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="1,2,3", help="Where would these tokens go?")
    ] = None,
    cache_salt: Annotated[
        str, typer.Option("--cache-salt", metavar="TEXT", help="The salt that the request would bring.")
    ] = "",
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose request it would be.")] = "",
    *,
    model: options.OfModelOption = "",
    timeout_s: options.WaitOption = options.STATUS_TIMEOUT_S,
    router: OperatorsRouter,
    as_json: options.JsonOption = False,
) -> None:
    """Show why a request went to its workers and what took how long, or where a prompt would go if it came now."""
    if sum(subject is not None for subject in (request_id, prompt, chat, tokens)) != 1:
        raise typer.BadParameter("give a REQUEST_ID or one of --prompt, --chat and --tokens", param_hint="REQUEST_ID")
    if request_id is not None and (cache_salt or tenant):
        raise typer.BadParameter(
            "a request that was placed has its own: leave them out", param_hint="--cache-salt, --tenant"
        )
    subject = pb.ExplainRequest(request_id=request_id, text=prompt, cache_salt=cache_salt, tenant=tenant, model=model)
    if chat is not None:
        subject.chat.messages.append(pb.ChatMessage(role="user", content=chat))
    if tokens is not None:
        subject.tokens.ids.extend(token_ids(tokens))
        subject.tokens.SetInParent()
    response = router.ask(timeout_s, lambda client: client.explain(subject, timeout_s))
    if as_json:
        typer.echo(json.dumps(_fields(response)))
    else:
        _show(response)


def _show(response: pb.ExplainResponse) -> None:
    out, rules = console(), response.rules
    for decision in response.decisions:
        for line in _story(decision, rules):
            out.print(line)
        if decision.candidates:
            print_table(out, _candidates(decision, rules))
        for worker in decision.left_out:
            out.print(f"not weighed: {worker.worker_id} ({worker.role}) {_why_left_out(worker)}")
        out.print()
    if response.hops:
        print_table(out, _timeline(response))
        out.print()
    for line in _formula(rules):
        out.print(line)
    if response.other_requests:
        out.print(f"{response.other_requests} older requests have the same id; the log names each one in full")


def _timeline(response: pb.ExplainResponse) -> Table:
    table = Table("hop", "worker")
    for header in ("from ms", "took ms", "off by ms"):
        table.add_column(header, justify="right")
    table.add_column("")
    for hop in response.hops:
        first = "  " * hop.depth + (hop.name if hop.depth else f"choice {hop.choice}, attempt {hop.attempt}")
        off_by = f"{hop.off_by_ms:.2f}" if hop.off_by_ms else ""
        times = (f"{hop.from_ms:.2f}", f"{hop.to_ms - hop.from_ms:.2f}", off_by)
        table.add_row(first, hop.worker, *times, ", ".join(_carried(hop)), style=None if hop.depth else "bold")
    return table


def _carried(hop: pb.Hop) -> Iterator[str]:
    if hop.tokens:
        yield counted(hop.tokens, "token")
    if hop.kv_bytes:
        yield f"{human_bytes(hop.kv_bytes)} of {hop.layers} layers at {hop.gb_per_s:.3g} GB/s by {hop.transport}"
    if hop.problem:
        yield hop.problem


def _formula(rules: pb.PlacementRules) -> Iterator[str]:
    """The lines that say how the terms become a cost."""
    weights = rules.weights
    amounts = (f"{weights[term.key]:g} * {term.amount}" if term.key else term.amount for term in rules.terms)
    yield f"cost in ms: {' + '.join(amounts)}"
    yield f"shipped: also {weights['ship_ms']:g} ms and what the prefill worker takes"
    yield f"kept by a prefill worker without answers: also {weights['keep_steps']:g} * its decode step"
    yield (
        f"others: {weights['crowd_weight']:g} * uncached share * (min(mean queue, queued + prompt / 4)"
        " + 3 * (1 - 1 / workers) * min(shortest queue, prompt)) + 0.5 * uncached * min(8, blocks in use / unused); "
        f"where there are prefill workers also {weights['delay_weight']:g} * own computing * min(8, requests), "
        "one more on a decode worker"
    )


def _story(decision: pb.Decision, rules: pb.PlacementRules) -> Iterator[str]:
    length = counted(decision.num_tokens, "token")
    if decision.request_id:
        refused = decision.reason == pb.PLACEMENT_REASON_TOO_LATE
        waited = "" if refused else f" after {decision.waited_s * 1000:.1f} ms in the queue"
        yield (
            f"request {decision.request_id}, choice {decision.choice}, attempt {decision.attempt}: "
            f"{length}, {'refused' if refused else 'placed'} {decision.age_s:.1f} s ago{waited}"
        )
    else:
        yield f"a prompt of {length}, if it came now:"
    reason = REASONS[decision.reason]
    if not decision.decode_worker:
        yield reason
    elif decision.prefill_worker:
        yield f"decode on {decision.decode_worker}, prompt shipped from {decision.prefill_worker} ({reason})"
    else:
        yield f"decode on {decision.decode_worker}, which runs the prompt itself ({reason})"
    for candidate in decision.candidates:
        # A prefill worker that keeps the answer has its reason above.
        if candidate.chosen and candidate.role == "decode":
            yield _disaggregation(candidate, decision, rules)
    if decision.expected_ms:
        took = f", which took {decision.took_ms:.1f} ms" if decision.took_ms else ""
        yield f"expected {decision.expected_ms:.1f} ms until the first token{took}"


def _disaggregation(decode: pb.CandidateCost, decision: pb.Decision, rules: pb.PlacementRules) -> str:
    """The rule by which the prompt was shipped or not, with its numbers."""
    if decision.reason == pb.PLACEMENT_REASON_NO_PREFILL:
        return "no prefill worker could be asked, so that nothing was shipped"
    uncached, most = decode.uncached_tokens, rules.local_prefill_tokens
    missing = f"{counted(uncached, 'token')} not cached on {decode.worker_id}"
    story = f"{missing}, {decode.queued_prefill_tokens} queued there"
    if decision.reason == pb.PLACEMENT_REASON_PREFILL_FULL:
        return f"{story}; each prefill worker had prefill_queue_tokens {rules.prefill_queue_tokens} or more"
    if uncached > most:
        return f"{story}: more than local_prefill_tokens {most}"
    return f"{story}: it costs less {'there' if decode.runs_prompt else 'to ship the prompt'}"


def _candidates(decision: pb.Decision, rules: pb.PlacementRules) -> Table:
    table = Table("worker", "role", "prompt's KV")
    counted = {term.name for candidate in decision.candidates for term in candidate.terms if term.value}
    shown = [term for term in rules.terms if term.name not in TIERS or term.name in counted]
    for header in (*(term.heading for term in shown), "= cost", "chance"):
        table.add_column(header, justify="right")
    table.add_column("")
    for candidate in decision.candidates:
        values = {term.name: term.value for term in candidate.terms}
        table.add_row(
            candidate.worker_id,
            candidate.role,
            "computed" if candidate.runs_prompt else "received",
            *(f"{term:.4g}" for term in (*(values[term.name] for term in shown), candidate.total)),
            f"{candidate.chance:.0%}",
            _outcome(candidate, decision),
            style="bold" if candidate.chosen else None,
        )
    return table


def _outcome(candidate: pb.CandidateCost, decision: pb.Decision) -> str:
    if candidate.chosen:
        return "chosen" if candidate.chance > 0.999 else "chosen by chance"
    if candidate.barred:
        return f"barred: {BARRED[candidate.barred]}"
    if candidate.role == "prefill" and not decision.prefill_worker:
        return "not needed"
    chosen = next((c for c in decision.candidates if c.chosen and c.role == candidate.role), None)
    if chosen is None:
        return ""
    more = candidate.total - chosen.total
    return "as good" if more == 0 else f"{more:+.4g}"


def _why_left_out(worker: pb.LeftOut) -> str:
    return LEFT_OUT[worker.reason].format(worker.detail)


def _fields(response: pb.ExplainResponse) -> dict[str, Any]:
    rules = message_fields(response.rules)
    del rules["terms"]
    return {
        "decisions": [_decision_fields(decision) for decision in response.decisions],
        "rules": rules | rules.pop("weights"),
        "other_requests": response.other_requests,
        "hops": [message_fields(hop) for hop in response.hops],
    }


def _decision_fields(decision: pb.Decision) -> dict[str, Any]:
    return message_fields(decision) | {
        "reason": REASONS[decision.reason],
        "candidates": [_candidate_fields(candidate) for candidate in decision.candidates],
        "left_out": [
            {"worker_id": worker.worker_id, "role": worker.role, "reason": _why_left_out(worker)}
            for worker in decision.left_out
        ],
    }


def _candidate_fields(candidate: pb.CandidateCost) -> dict[str, Any]:
    fields = message_fields(candidate) | {"barred": BARRED[candidate.barred]}
    del fields["terms"]
    return fields | {f"{term.name}_term": term.value for term in candidate.terms}
