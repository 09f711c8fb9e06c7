"""The `prefill` streams: prompts and grants of one decode worker come in, bad news goes out.

Good news travels with the KV.
"""

from typing import Protocol

import structlog

from baton.message_stream import MessageStream
from baton_proto.worker import PrefillCancel, PrefillCommand, PrefillFailed, PrefillRequest, decoder

decode_command = decoder(PrefillCommand)

log = structlog.get_logger()


class DecodeStream:
    """One decode worker's open stream. Event loop only."""

    def __init__(self, decode_worker: str, stream: MessageStream) -> None:
        self.decode_worker = decode_worker
        self._stream = stream

    def send(self, failed: PrefillFailed) -> None:
        self._stream.send(failed)

    def close(self) -> None:
        """Ends the stream after what is pending was written."""
        self._stream.close()


class PrefillHandler(Protocol):
    def accept(self, stream: DecodeStream, request: PrefillRequest) -> None: ...

    def cancel(self, stream: DecodeStream, request_id: str) -> None: ...

    def decode_worker_gone(self, stream: DecodeStream) -> None:
        """Nobody wants the KV any more: end the stream's prompts."""
        ...


class PrefillStreams:
    def __init__(self, handler: PrefillHandler) -> None:
        self._handler = handler
        self._open: set[DecodeStream] = set()

    async def serve(self, stream: MessageStream, decode_worker: str) -> None:
        """From the hellos to the end."""
        decode = DecodeStream(decode_worker, stream)
        self._open.add(decode)
        log.info("decode worker connected", decode_worker=decode_worker)
        try:
            stream.listen(decode_command, lambda command: self._obey(decode, command))
            reason = await stream.ended()
        finally:
            self._open.discard(decode)
            self._handler.decode_worker_gone(decode)
        log.info("decode worker disconnected", decode_worker=decode_worker, reason=reason)

    def close(self) -> None:
        for stream in self._open:
            stream.close()

    def _obey(self, stream: DecodeStream, command: PrefillRequest | PrefillCancel) -> None:
        if isinstance(command, PrefillRequest):
            self._handler.accept(stream, command)
        else:
            self._handler.cancel(stream, command.request_id)
