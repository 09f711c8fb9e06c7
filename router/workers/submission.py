"""One attempt's stay on its decode worker, from its submission to its end."""

import asyncio
from collections.abc import Callable

from baton_proto.worker import Submit
from router.workers.inbox import Inbox, UnreadError, nothing
from router.workers.link import WorkerLink


class Submission:
    """`with` gives the inbox; leaving it cancels the request on the worker unless it has ended there."""

    __slots__ = ("_inbox", "_late", "_link", "_release", "_request_id", "_timer")

    def __init__(
        self, link: WorkerLink, submit: Submit, late: Callable[[], Exception], release: Callable[[], None]
    ) -> None:
        """The inbox fails with the error that `late` makes when the request's time is up, and with UnreadError when its
        reader does not read: then the request is cancelled and `release` is called, so that its worker serves others.
        Raises WorkerLostError when there is no stream."""
        self._late = late
        self._release = release
        self._link = link
        self._request_id = submit.request_id
        self._inbox = link.submit(submit)
        self._inbox.full = self._stop
        self._timer = asyncio.get_running_loop().call_later(submit.timeout_s, self._expire)

    def __enter__(self) -> Inbox:
        return self._inbox

    def __exit__(self, *why: object) -> None:
        self._timer.cancel()
        self._inbox.full = nothing  # else it would keep us, and we keep it, until the collector comes
        self._link.cancel(self._request_id)

    def _expire(self) -> None:
        self._inbox.fail(self._late())

    def _stop(self) -> None:
        self._link.cancel(self._request_id)
        self._inbox.fail(UnreadError())
        self._release()
