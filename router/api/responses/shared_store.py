"""The responses of all routers of a service: beside the memory of the router that gave a response, a JetStream bucket
holds it, so that any router can go on from it, also when the first has ended.

A response is stored before its last event is sent. What is larger than a message of NATS, or is complete while NATS is
away, stays with its router.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable
from typing import Final

import msgspec
import structlog
from msgspec import Raw

from baton_proto.decoding import decoder
from baton_proto.routers.saved_response import MAJOR, SavedResponse, decode_saved_response, encode_saved_response
from router.api.http.json_response import encode_json
from router.api.responses.store import Conversation, ResponseStore, Stored
from router.siblings import Siblings
from router.text.chat_template import Message
from runtime.nats.bucket import bucket_config
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.library import DiscardPolicy, js_errors
from runtime.nats.subjects import responses_key, responses_stream
from runtime.sparing import Sparing

FORGET: Final = "forget_response"
STORE_S: Final = 1.0  # that an answer's end, or a question, waits for NATS
ID: Final = re.compile(r"resp_[0-9a-f]{32}")  # of a response; nothing else may become part of a subject

log = structlog.get_logger()
spare = Sparing(lines=2)
_decode_messages = decoder(list[Message], json=True)


class SharedResponseStore(ResponseStore):
    """Each router keeps up to `limit_bytes`, and the bucket as much as all `num_routers` together."""

    def __init__(self, nats: NatsClient, siblings: Siblings, limit_bytes: int, num_routers: int) -> None:
        super().__init__(limit_bytes)
        self._saving: set[asyncio.Task[None]] = set()
        self._nats = nats
        self._siblings = siblings
        self._name = responses_stream(nats.namespace)
        bucket = bucket_config(self._name, responses_key(nats.namespace), max_age=self.ttl_s)
        self._bucket = bucket.evolve(discard=DiscardPolicy.OLD, max_bytes=num_routers * limit_bytes)

    async def start(self) -> None:
        async def forget(response_id: bytes) -> bytes:
            self.drop(response_id.decode())
            return b""

        await self._siblings.answer(FORGET, forget)

    def save(self, response_id: str, stored: Stored) -> Awaitable[None]:
        conversation = stored.conversation
        saved = SavedResponse(
            version=MAJOR,
            tenant=stored.tenant,
            messages=Raw(encode_json(conversation.messages)),
            argument_chars=conversation.argument_chars,
            num_bytes=conversation.num_bytes,
            body=Raw(stored.body),
            until_s=time.time() + self.ttl_s,
        )
        saving = asyncio.create_task(self._publish(response_id, encode_saved_response(saved)))  # also for who has left
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        return saving

    async def find(self, response_id: str, tenant: str) -> bool:
        if not ID.fullmatch(response_id):
            return False
        with contextlib.suppress(msgspec.DecodeError, *NATS_ERRORS):
            async with asyncio.timeout(STORE_S):
                message = await self._nats.stored_message(self._name, responses_key(self._nats.namespace, response_id))
            if message is None or not message.data:
                return False
            saved = decode_saved_response(message.data)
            conversation = Conversation(_decode_messages(saved.messages), saved.argument_chars, saved.num_bytes)
            self.adopt(response_id, saved.tenant, conversation, bytes(saved.body), saved.until_s - time.time())
        return self.get(response_id, tenant) is not None

    async def forget(self, response_id: str) -> None:
        """In the bucket, and in the memory of the other routers."""
        await self._publish(response_id, b"")
        await self._siblings.ask(FORGET, response_id.encode())

    async def _publish(self, response_id: str, payload: bytes) -> None:
        key = responses_key(self._nats.namespace, response_id)
        try:
            async with asyncio.timeout(STORE_S):
                try:
                    await self._nats.publish_stored(key, payload)
                except js_errors.NoStreamResponseError:  # it is the first one, or NATS has lost its store
                    await self._nats.ensure_stream(self._bucket)
                    await self._nats.publish_stored(key, payload)
        except NATS_ERRORS as error:
            spare(log.warning, "a response stays with this router alone", reason=str(error) or "no answer")
