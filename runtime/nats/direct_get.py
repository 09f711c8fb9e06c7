"""Many messages of a JetStream stream with one request, without a consumer on the server that an outage could remove:
the batched direct get of NATS 2.11 (ADR-31 of the NATS architecture decision records)."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime

from runtime.nats.library import Client, Msg, nats_errors

MAX_ANSWER_BYTES = 4 * 1024 * 1024
END_OF_BATCH = "204"
NO_MESSAGE = "404"
NO_STREAM = "503"


@dataclass(frozen=True, slots=True)
class StoredMessage:
    sequence: int  # position in the stream, counted over all subjects
    time_s: float  # Unix time at which the server stored it
    subject: str
    payload: bytes


async def direct_get(
    client: Client, stream: str, subject: str, start: int | datetime, limit: int, timeout_s: float
) -> list[StoredMessage]:
    """Raises TimeoutError and nats_errors.Error."""
    position = {"seq": start} if isinstance(start, int) else {"start_time": start.astimezone(UTC).isoformat()}
    wanted = {**position, "next_by_subj": subject, "batch": limit, "max_bytes": MAX_ANSWER_BYTES}
    answer = _Answer()
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=answer.receive)
    try:
        await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(wanted).encode(), reply=inbox)
        async with asyncio.timeout(timeout_s):
            await answer.complete
        return answer.messages
    finally:
        with contextlib.suppress(nats_errors.Error):  # the connection may be lost, and the subscription with it
            await subscription.unsubscribe()


class _Answer:
    def __init__(self) -> None:
        self.messages: list[StoredMessage] = []
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def receive(self, message: Msg) -> None:
        headers = message.headers or {}
        if "Nats-Sequence" in headers:
            stored_at = datetime.fromisoformat(headers["Nats-Time-Stamp"])
            self.messages.append(
                StoredMessage(
                    int(headers["Nats-Sequence"]), stored_at.timestamp(), headers["Nats-Subject"], message.data
                )
            )
        elif not self.complete.done():
            status = headers.get("Status", "")
            if status in (END_OF_BATCH, NO_MESSAGE, NO_STREAM):
                self.complete.set_result(None)
            else:
                why = headers.get("Description", "without a reason")
                self.complete.set_exception(nats_errors.Error(f"JetStream refuses: {status} {why}"))
