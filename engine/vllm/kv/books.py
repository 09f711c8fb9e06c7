"""The connector's half in vLLM's scheduler: which requests share KV, and what a step has to tell the worker process.

Pure; method by method what vLLM's `KVConnectorBase_V1` asks of its scheduler's side.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.vllm.kv.messages import Chunk, Reserved

PARAMETER = "baton"  # of a request's kv_transfer_params
FETCH, SEND = "fetch", "send"  # its values: another worker computes the prompt; another worker gets the prompt's KV


@dataclass(slots=True)
class Step:
    """vLLM carries it from the scheduler to the process that computes."""

    reserved: list[Reserved] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # preempted
    ended: list[str] = field(default_factory=list)  # prompts whose blocks are kept until they are Sent


class SharedRequests:
    def __init__(self) -> None:
        self._to_fetch: set[str] = set()  # have no blocks yet
        self._fetching: dict[str, int] = {}  # cached tokens of those that vLLM is asking about
        self._sending: set[str] = set()  # computed, and not preempted
        self._step = Step()

    def new_request(self, request: Any) -> None:
        way = _way(request)
        if way == FETCH:
            self._to_fetch.add(request.request_id)
        elif way == SEND:
            self._sending.add(request.request_id)

    def tokens_to_fetch(self, request: Any, num_cached: int) -> tuple[int, bool]:
        """All behind the prefix that is cached here, once: a request that is preempted later is computed here."""
        if request.request_id not in self._to_fetch:
            return 0, False
        self._fetching[request.request_id] = num_cached
        return request.num_tokens - num_cached, True

    def allocated(self, request: Any, block_ids: list[int], num_to_fetch: int) -> None:
        if num_to_fetch and request.request_id in self._to_fetch:
            self._to_fetch.remove(request.request_id)
            cached = self._fetching.pop(request.request_id)
            self._step.reserved.append(Reserved(request.request_id, block_ids, cached))

    def step(self, scheduled: Any) -> Step:
        """What happened since the last step, and what this one computes of prompts that are sent."""
        step, self._step = self._step, Step()
        for request_id in scheduled.preempted_req_ids or ():
            if request_id in self._sending:
                self._sending.remove(request_id)
                step.lost.append(request_id)
        cached = scheduled.scheduled_cached_reqs
        rows = [(new.req_id, new.num_computed_tokens, new.block_ids) for new in scheduled.scheduled_new_reqs]
        rows += zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        for request_id, start, blocks in rows:
            if request_id in self._sending:
                end = start + scheduled.num_scheduled_tokens[request_id]
                step.chunks.append(Chunk(request_id, start, end, list(blocks[0]) if blocks else []))
        return step

    def ended(self, request: Any) -> bool:
        """Whether the request's blocks are kept until the connector has said that they are sent."""
        self._to_fetch.discard(request.request_id)
        self._fetching.pop(request.request_id, None)
        self._sending.discard(request.request_id)
        if _way(request) != SEND:
            return False
        self._step.ended.append(request.request_id)
        return True


def _way(request: Any) -> str | None:
    return (request.kv_transfer_params or {}).get(PARAMETER)
