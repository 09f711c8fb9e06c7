"""The first message of every stream: who speaks, in which version, and to which incarnation."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton_proto.worker import MAJOR, Hello


async def receive_hello(
    messages: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any], ours: Hello
) -> Hello:
    """Reads the peer's Hello and answers with ours. Ends the call when the peer speaks another version or expects
    another incarnation of this worker (0: any): what it knows of us, cached blocks above all, died with that one."""
    theirs = await anext(messages, None)
    if not isinstance(theirs, Hello):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of a stream must be a hello")
    elif theirs.version != MAJOR:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"version {theirs.version} of the worker protocol is not understood here; this build speaks {MAJOR}",
        )
    elif theirs.incarnation not in (0, ours.incarnation):
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{ours.sender} runs as incarnation {ours.incarnation}, not {theirs.incarnation}",
        )
    await context.write(ours)
    return theirs
