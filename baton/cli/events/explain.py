"""`baton events explain`: every candidate worker of a request, each term of its cost, and why the chosen one won."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from baton.cli.access import Access
from baton.cli.answering import message_fields
from baton.cli.asking import ask
from baton.cli.options import (
    DEFAULT_ADDRESS,
    STATUS_TIMEOUT_S,
    AddressOption,
    ApiKeyFileOption,
    CaFileOption,
    JsonOption,
    WaitOption,
)
from baton.cli.output import console
from baton.cli.token_list import token_ids
from baton_proto.generated import inference_pb2 as pb


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
    timeout_s: WaitOption = STATUS_TIMEOUT_S,
    address: AddressOption = DEFAULT_ADDRESS,
    api_key_file: ApiKeyFileOption = None,
    ca_file: CaFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show why a request went to its workers, or where a prompt would go if it came now."""
    if sum(subject is not None for subject in (request_id, prompt, chat, tokens)) != 1:
        raise typer.BadParameter("give a REQUEST_ID or one of --prompt, --chat and --tokens", param_hint="REQUEST_ID")
    subject = pb.ExplainRequest(request_id=request_id, text=prompt)
    if chat is not None:
        subject.chat.messages.append(pb.ChatMessage(role="user", content=chat))
    if tokens is not None:
        subject.tokens.ids.extend(token_ids(tokens))
        subject.tokens.SetInParent()
    access = Access(address, api_key_file, ca_file)
    response = ask(access, timeout_s, lambda client: client.explain(subject, timeout_s))
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
            out.print(_candidates(decision))
        for worker in decision.left_out:
            out.print(f"not weighed: {worker.worker_id} ({worker.role}) {worker.reason}")
        out.print()
    out.print(
        f"cost in blocks of {rules.block_size} tokens: {rules.prefill_weight:g} * (prompt - {rules.overlap_weight:g} * "
        f"cached + queued) + {rules.transfer_weight:g} * shipped + {rules.load_weight:g} * active; "
        f"temperature {rules.temperature:g}"
    )
    if rules.attention_tokens:
        out.print(
            f"prompt, cached and queued count attention: behind {rules.attention_tokens} tokens a block counts as two"
        )
    out.print(
        f"without prefill workers: {rules.mixed_overlap_weight:g} * cached, less for a prefix that everybody asks for; "
        f"{rules.mixed_load_weight:g} * active; + {rules.eviction_weight:g} * stored lately"
    )
    if response.other_requests:
        out.print(f"{response.other_requests} older requests have the same id; the log names each one in full")


def _story(decision: pb.Decision, rules: pb.PlacementRules) -> Iterator[str]:
    if decision.request_id:
        yield (
            f"request {decision.request_id}, choice {decision.choice}, attempt {decision.attempt}: "
            f"{decision.num_tokens} tokens, "
            f"placed {decision.age_s:.1f} s ago after {decision.waited_s * 1000:.1f} ms in the queue"
        )
    else:
        yield f"a prompt of {decision.num_tokens} tokens, if it came now:"
    if not decision.decode_worker:
        yield decision.reason
    elif decision.prefill_worker:
        yield f"decode on {decision.decode_worker}, prompt shipped from {decision.prefill_worker} ({decision.reason})"
    else:
        yield f"decode on {decision.decode_worker}, which runs the prompt itself ({decision.reason})"
    for candidate in decision.candidates:
        if candidate.chosen and candidate.role == "decode":
            yield _disaggregation(candidate, decision, rules)


def _disaggregation(decode: pb.CandidateCost, decision: pb.Decision, rules: pb.PlacementRules) -> str:
    """The rule by which the prompt was shipped or not, with its numbers."""
    if decision.reason == "no prefill worker":
        return "no prefill worker could be asked, so that nothing was shipped"
    work = decode.uncached_tokens + decode.queued_prefill_tokens
    comparison = "at most" if work <= rules.local_prefill_tokens else "more than"
    story = (
        f"{decode.uncached_tokens} tokens not cached on {decode.worker_id} + {decode.queued_prefill_tokens} queued "
        f"there = {work}, {comparison} local_prefill_tokens {rules.local_prefill_tokens}"
    )
    if decision.reason == "prefill workers full":
        story += f", but each prefill worker had prefill_queue_tokens {rules.prefill_queue_tokens} or more"
    elif work <= rules.local_prefill_tokens and not decode.runs_prompt:
        story += f", but it had local_prefill_requests {rules.local_prefill_requests} or more"
    return story


def _candidates(decision: pb.Decision) -> Table:
    table = Table("worker", "role", "prompt's KV")
    for header in ("prompt", "- cached", "+ queued", "+ shipped", "+ load", "+ stored", "= cost", "chance"):
        table.add_column(header, justify="right")
    table.add_column("")
    for candidate in decision.candidates:
        terms = (
            candidate.prompt_term,
            candidate.cached_term,
            candidate.queued_term,
            candidate.transfer_term,
            candidate.load_term,
            candidate.eviction_term,
        )
        table.add_row(
            candidate.worker_id,
            candidate.role,
            "computed" if candidate.runs_prompt else "received",
            *(f"{term:.6g}" for term in (*terms, candidate.total)),
            f"{candidate.chance:.0%}",
            _outcome(candidate, decision),
            style="bold" if candidate.chosen else None,
        )
    return table


def _outcome(candidate: pb.CandidateCost, decision: pb.Decision) -> str:
    if candidate.chosen:
        return "chosen" if candidate.chance > 0.999 else "chosen by chance"
    if candidate.barred:
        return f"barred: {candidate.barred}"
    if candidate.role == "prefill" and not decision.prefill_worker:
        return "not needed"
    chosen = next((c for c in decision.candidates if c.chosen and c.role == candidate.role), None)
    if chosen is None:
        return ""
    more = candidate.total - chosen.total
    return "as good" if more == 0 else f"{more:+g}"


def _fields(response: pb.ExplainResponse) -> dict[str, Any]:
    return {
        "decisions": [
            message_fields(decision)
            | {
                "candidates": [message_fields(candidate) for candidate in decision.candidates],
                "left_out": [message_fields(worker) for worker in decision.left_out],
            }
            for decision in response.decisions
        ],
        "rules": message_fields(response.rules),
        "other_requests": response.other_requests,
    }
