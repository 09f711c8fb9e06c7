"""Client: what AsyncClient does, for programs without an event loop."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar, Unpack

from baton.client.async_client import CLOSED, AsyncClient, AsyncStream
from baton.client.chat import Message
from baton.client.request import Options, Prompt
from baton.client.service_status import Model, Status, WorkerSleep, WorkerWeights
from runtime.calls.answer import Answer, Piece
from runtime.errors import BatonError, UnavailableError

T = TypeVar("T")


class Client:
    """AsyncClient's methods, each of which waits for its result; arguments and errors are the same. Threads may share
    one. Its event loop runs in a thread of its own, so it works in a notebook too."""

    def __init__(
        self,
        address: str = "",
        api_key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        operator_key: str | None = None,
    ) -> None:
        self._client = AsyncClient(address, api_key, ca, operator_key)
        self._loop = _LoopThread()
        self._finish = weakref.finalize(self, self._loop.end, self._client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is in flight."""
        self._finish()

    def generate(
        self,
        prompt: Prompt,
        sampling: object = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        return self._loop.run(self._client.generate(prompt, sampling, timeout_s=timeout_s, **options))

    def stream(
        self,
        prompt: Prompt,
        sampling: object = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> "Stream":
        return Stream(self._client.stream(prompt, sampling, timeout_s=timeout_s, **options), self._loop)

    def chat(
        self,
        messages: str | Sequence[Message],
        sampling: object = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        return self._loop.run(self._client.chat(messages, sampling, timeout_s=timeout_s, **options))

    def models(self, timeout_s: float | None = 10.0) -> list[Model]:
        return self._loop.run(self._client.models(timeout_s))

    def status(self, timeout_s: float | None = 10.0, model: str = "") -> Status:
        return self._loop.run(self._client.status(timeout_s, model))

    def sleep(self, worker: str, level: int = 1, timeout_s: float = 30.0) -> WorkerSleep:
        return self._loop.run(self._client.sleep(worker, level, timeout_s))

    def wake(self, worker: str, tags: Sequence[str] = ()) -> WorkerSleep:
        return self._loop.run(self._client.wake(worker, tags))

    def sleep_all(
        self, level: int = 1, timeout_s: float = 30.0, model: str = ""
    ) -> dict[str, WorkerSleep | BatonError]:
        return self._loop.run(self._client.sleep_all(level, timeout_s, model))

    def wake_all(self, tags: Sequence[str] = (), model: str = "") -> dict[str, WorkerSleep | BatonError]:
        return self._loop.run(self._client.wake_all(tags, model))

    def update_weights(
        self, model: str | os.PathLike[str], worker: str = "", timeout_s: float = 30.0, served_model: str = ""
    ) -> list[WorkerWeights]:
        return self._loop.run(self._client.update_weights(model, worker, timeout_s, served_model))


class Stream:
    """The pieces of an answer as they come. Closing it, leaving it as a context or forgetting it cancels the
    request."""

    def __init__(self, stream: AsyncStream, loop: "_LoopThread") -> None:
        self._stream = stream
        self._loop = loop

    @property
    def answer(self) -> Answer:
        """The answer up to now."""
        return self._stream.answer

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        piece = self._loop.run(anext(self._stream, None))
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.run(self._stream.close())

    def __del__(self) -> None:
        self._loop.start(self._stream.close)


class _LoopThread:
    """An event loop in a thread that ends with it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended = False
        self._ending = threading.RLock()  # whoever collects garbage may call start() while it holds it
        self._thread = threading.Thread(target=self._serve, name="baton client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. What interrupts the caller, such as Ctrl-C, cancels it."""
        with self._ending:
            if self._ended:
                work.close()
                raise UnavailableError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise UnavailableError(CLOSED) from error
        except BaseException:
            future.cancel()
            raise

    def start(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does not wait, because whatever thread collects garbage may call it."""
        with self._ending:
            if not self._ended:
                asyncio.run_coroutine_threadsafe(make(), self._loop)

    def end(self, client: AsyncClient) -> None:
        self.run(client.close())  # from now on each call fails at once
        with self._ending:
            self._ended = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
