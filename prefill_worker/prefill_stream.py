"""The `prefill` streams: prompts and grants of a decode worker come in, failures go out; success comes with the KV."""

from collections.abc import Callable

import structlog

from baton_proto.decoding import decoder
from baton_proto.worker import PrefillCancel, PrefillCommand, PrefillRequest
from engine.sequences.sequence import Sequence
from runtime.grammar.matcher import Matcher
from runtime.streams.message_stream import MessageStream
from worker.stamps import due_at

decode_command = decoder(PrefillCommand)

log = structlog.get_logger()


def sequence_of(
    request: PrefillRequest, name: str, token_ids: list[int], *, pinned: bool = False, matcher: Matcher | None = None
) -> Sequence:
    """What the engine is given for a prompt. `name`: the sequence's."""
    return Sequence(
        name,
        token_ids,
        request.num_prompt_tokens,
        request.sampling,
        priority=request.priority,
        prefill_only=True,
        pinned=pinned,
        hash_seed=request.hash_seed,
        hint=request.hint,
        matcher=matcher,
        due_s=due_at(request.due_ms),
        adapter=request.adapter,
    )


class PrefillStreams:
    """Event loop only. `on_gone`: nobody wants the KV of a stream's prompts any more."""

    def __init__(
        self,
        on_request: Callable[[MessageStream, PrefillRequest], None],
        on_cancel: Callable[[MessageStream, str], None],
        on_gone: Callable[[MessageStream], None],
    ) -> None:
        self._on_request = on_request
        self._on_cancel = on_cancel
        self._on_gone = on_gone
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
            self._on_gone(stream)
        log.info("decode worker disconnected", decode_worker=decode_worker, reason=reason)

    def close(self) -> None:
        """Ends the streams after pending messages have left."""
        for stream in self._open:
            stream.close()

    def _obey(self, stream: MessageStream, command: PrefillRequest | PrefillCancel) -> None:
        if isinstance(command, PrefillRequest):
            self._on_request(stream, command)
        else:
            self._on_cancel(stream, command.request_id)
