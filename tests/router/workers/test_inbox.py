"""What comes of an inbox that fails."""

import contextlib
import weakref

from router.workers.inbox import Inbox, UnreadError
from router.workers.pace import Pace


class Request:
    """What a reader of an inbox holds."""


async def test_a_failure_that_was_read_does_not_keep_its_reader() -> None:
    inbox, requests = Inbox(Pace()), weakref.WeakSet[Request]()
    inbox.fail(UnreadError())

    async def read() -> None:
        request = Request()
        requests.add(request)
        await inbox.take()

    with contextlib.suppress(UnreadError):
        await read()
    assert not requests
