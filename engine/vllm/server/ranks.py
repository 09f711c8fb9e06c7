"""The ranks of a vLLM server: with --data-parallel-size N it has N engines, each with its own cache and KV events."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.vllm.server.gauges import Gauges
from runtime.config.external import ExternalWorkerConfig

HEADER: Final = "X-data-parallel-rank"  # by it vLLM takes a rank for a request instead of balancing itself
TCP: Final = "tcp://"


@dataclass(frozen=True, slots=True)
class Rank:
    number: int  # vLLM's own, as in its metrics
    num_blocks: int
    events: str  # where it publishes its KV events; empty: they are not followed
    replay: str
    headers: Mapping[str, str] = field(default_factory=dict)  # of requests that it shall serve


def ranks_of(gauges: Mapping[int, Gauges], external: ExternalWorkerConfig) -> Iterator[Rank]:
    """gauges: of all ranks. A server's only one is where the configuration says, and asked for by nothing."""
    if len(gauges) == 1:
        (only,) = gauges
        yield Rank(only, gauges[only].num_blocks, external.events or "", external.replay or "")
        return
    for place, number in enumerate(sorted(gauges)):  # a server with some of all ranks counts its own from 0
        events, replay = (_of_rank(each or "", number) for each in (external.events, external.replay))
        yield Rank(number, gauges[number].num_blocks, events, replay, {HEADER: str(place)})


def _of_rank(endpoint: str, number: int) -> str:
    """vLLM adds a rank's number to the port."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + number}" if endpoint.startswith(TCP) else endpoint
