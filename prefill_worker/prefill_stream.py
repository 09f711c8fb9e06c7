"""The `prefill` streams: prompts and grants of a decode worker come in, failures go out; success comes with the KV."""

from typing import Protocol

import structlog

from baton_proto.worker import PrefillCancel, PrefillCommand, PrefillRequest, decoder
from runtime.streams.message_stream import MessageStream

decode_command = decoder(PrefillCommand)

log = structlog.get_logger()


class PrefillHandler(Protocol):
    """What a prefill worker does with a decode worker's commands. Event loop only."""

    def accept(self, stream: MessageStream, request: PrefillRequest) -> None: ...

    def cancel(self, stream: MessageStream, request_id: str) -> None: ...

    def decode_worker_gone(self, stream: MessageStream) -> None:
        """Ends the stream's prompts, because nobody wants their KV any more."""
        ...


class PrefillStreams:
    def __init__(self, handler: PrefillHandler) -> None:
        self._handler = handler
        self._open: set[MessageStream] = set()

    async def serve(self, stream: MessageStream, decode_worker: str) -> None:
        """Serves a stream from the hellos to its end."""
        self._open.add(stream)
        log.info("decode worker connected", decode_worker=decode_worker)
        try:
            stream.listen(decode_command, lambda command: self._obey(stream, command))
            reason = await stream.ended()
        finally:
            self._open.discard(stream)
            self._handler.decode_worker_gone(stream)
        log.info("decode worker disconnected", decode_worker=decode_worker, reason=reason)

    def close(self) -> None:
        """Ends the streams after pending messages have left."""
        for stream in self._open:
            stream.close()

    def _obey(self, stream: MessageStream, command: PrefillRequest | PrefillCancel) -> None:
        if isinstance(command, PrefillRequest):
            self._handler.accept(stream, command)
        else:
            self._handler.cancel(stream, command.request_id)
