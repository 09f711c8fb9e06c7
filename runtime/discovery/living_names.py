"""Which names live in a namespace, for who is about to give names to new processes."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Set

import structlog

from runtime.discovery.directory import KV_OPERATION, TTL_S, Directory
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import ask_subject, worker_of, workers_key
from runtime.within import happens

ANSWER_S = 0.5

log = structlog.get_logger()


async def living_routers(nats: NatsClient, names: Iterable[str]) -> set[str]:
    """Those of `names` that routers of the namespace answer to."""
    living = set()
    for name in names:
        with contextlib.suppress(*NATS_ERRORS):
            await nats.request(ask_subject(nats.namespace, name, "status"), b"", ANSWER_S)
            living.add(name)
    return living


async def living_names(nats: NatsClient, names: Set[str], ttl_s: float = TTL_S) -> set[str]:
    """Those of `names` that workers of the namespace announce. A record alone proves nothing, because a worker that was
    killed leaves one: returns when a heartbeat has come, or when `ttl_s` has passed without one."""
    heard = asyncio.Event()

    def receive(subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        if worker_of(subject) in names and KV_OPERATION not in headers:
            heard.set()

    directory = Directory(nats, ttl_s)
    await directory.start()
    subscription = await nats.subscribe(workers_key(nats.namespace), receive)
    try:
        if found := (directory.workers.keys() | directory.foreign.keys()) & names:
            log.info("waiting for a heartbeat of who has these names", workers=sorted(found), timeout_s=ttl_s)
            await happens(heard, ttl_s)
        return (directory.workers.keys() | directory.foreign.keys()) & names if heard.is_set() else set()
    finally:
        await nats.unsubscribe(subscription)
        await directory.close()
