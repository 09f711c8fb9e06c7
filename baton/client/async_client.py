"""AsyncClient: text, status, sleep, wake and new weights of a running service."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from numbers import Real
from pathlib import Path
from typing import Self, TypeVar, Unpack

import grpc

from baton.client.chat import Message
from baton.client.lasting_stream import lasting
from baton.client.request import Options, Prompt, generate_request
from baton.client.service_status import Model, Status, WorkerSleep, WorkerWeights
from baton.runs.access import Access
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer, Piece, plain
from runtime.calls.router import Client as RouterClient
from runtime.errors import BatonError, InvalidRequestError, UnavailableError, shown
from runtime.security.secret import Secret, parse_secrets

EVER_S = 1e12
CLOSED = "this client is closed"

T = TypeVar("T")


class AsyncClient:
    """A client of one service, which it finds as commands do: without `address` it is the one that BATON_ADDRESS names,
    or else the one that this user runs on this machine.

    `address`: HOST:PORT of its gRPC, or its name. `api_key`: None takes BATON_API_KEY. `ca`: a file of certificates in
    PEM form, where the service speaks TLS; None takes BATON_CA_FILE. `operator_key`, for status, sleep and wake: None
    takes BATON_OPERATOR_KEY, or that of a service on this machine.

    It connects with the first call, and belongs to the event loop of that call. An answer whose router dies goes on at
    the next one that answers within `PATIENCE_S`, token for token. Calls raise UnavailableError when
    nothing listens there or no worker can serve, UnauthorizedError without the right key, ConfigError when an address,
    a key or a certificate cannot be used, InvalidRequestError, which names a field, OverloadedError, which says when
    to try again, DeadlineError after `timeout_s`, and else BatonError.
    """

    def __init__(
        self,
        address: str = "",
        api_key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        operator_key: str | None = None,
    ) -> None:
        ca = ca or os.environ.get("BATON_CA_FILE")
        self._access = Access(
            address or os.environ.get("BATON_ADDRESS", ""),
            ca_file=None if ca is None else Path(ca),
            api_key=_secret(api_key, "api_key"),
            operator_key=_secret(operator_key, "operator_key"),
        )
        self._connecting = asyncio.Lock()
        self._router: RouterClient | None = None
        self._closed = False

    @classmethod
    def through(cls, access: Access) -> Self:
        client = cls()
        client._access = access
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is in flight."""
        self._closed = True
        if self._router is not None:
            await self._router.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: object = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Continues a text or token ids, or answers the messages of a chat. `sampling`: a mapping, or an object with
        attributes of the names in Options; keywords go before it."""
        async with self.stream(prompt, sampling, timeout_s=timeout_s, **options) as stream:
            async for _ in stream:
                pass
        return stream.answer

    def stream(
        self,
        prompt: Prompt,
        sampling: object = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> "AsyncStream":
        """The pieces of what `generate` returns, as they come. Raises InvalidRequestError at once for what no service
        would take."""
        request = generate_request(prompt, sampling, options)
        if timeout_s is not None:
            if not isinstance(timeout_s, Real) or timeout_s != timeout_s:
                raise InvalidRequestError("timeout_s", f"is {shown(timeout_s)}, must be a number of seconds")
            timeout_s = float(min(timeout_s, EVER_S))  # a deadline in the precision of another number may have passed
        answer = Answer()
        return AsyncStream(answer, self._pieces(request, answer, timeout_s))

    async def chat(
        self,
        messages: str | Sequence[Message],
        sampling: object = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answers the messages of a chat; a text is one of the user."""
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return await self.generate(asked, sampling, timeout_s=timeout_s, **options)

    async def models(self, timeout_s: float | None = 10.0) -> list[Model]:
        return [plain(Model, model) for model in await self._ask(lambda router: router.models(timeout_s), timeout_s)]

    async def status(self, timeout_s: float | None = 10.0, model: str = "") -> Status:
        """`model` empty: of all."""
        return plain(Status, await self._ask(lambda router: router.status(timeout_s, model), timeout_s))

    async def sleep(self, worker: str, level: int = 1, timeout_s: float = 30.0) -> WorkerSleep:
        """Drains a worker and gives its memory back. Level 1 keeps its weights in host memory, 2 drops them. Raises
        BatonError with the worker's reason when it stays awake: requests in flight have `timeout_s` to end, and peers
        that map its KV as long again."""
        return plain(WorkerSleep, await self._ask(lambda router: router.sleep(worker, level, timeout_s)))

    async def wake(self, worker: str, tags: Sequence[str] = ()) -> WorkerSleep:
        """Takes a worker's memory again: "weights", "kv_cache", or without `tags` all."""
        return plain(WorkerSleep, await self._ask(lambda router: router.wake(worker, tags)))

    async def sleep_all(
        self, level: int = 1, timeout_s: float = 30.0, model: str = ""
    ) -> dict[str, WorkerSleep | BatonError]:
        """All workers at once, or all of a model, by id; the error of those that stay awake."""
        return await self._each(lambda worker: self.sleep(worker, level, timeout_s), model)

    async def wake_all(self, tags: Sequence[str] = (), model: str = "") -> dict[str, WorkerSleep | BatonError]:
        """All workers at once, or all of a model, by id; the error of those that sleep on."""
        return await self._each(lambda worker: self.wake(worker, tags), model)

    async def update_weights(
        self, model: str | os.PathLike[str], worker: str = "", timeout_s: float = 30.0, served_model: str = ""
    ) -> list[WorkerWeights]:
        """Workers drain, read the values of a checkpoint in place, forget their caches and serve again: one worker, or
        without `worker` all or none. `model`: a folder on the workers' machines;
        `served_model`: whose weights, where several are served. Raises BatonError with all reasons
        when nothing was changed: a checkpoint does not fit, or requests in flight do not end within `timeout_s`, or
        peers that map the KV do not let go within as long again."""
        if not isinstance(model, str | os.PathLike):
            raise InvalidRequestError("model", f"is {shown(model)}, must be the path of a folder")
        folder = str(Path(model).expanduser().absolute())
        answer = await self._ask(lambda router: router.update_weights(folder, worker, timeout_s, served_model))
        return [plain(WorkerWeights, one) for one in answer.workers]

    async def _each(
        self, ask: Callable[[str], Awaitable[WorkerSleep]], model: str
    ) -> dict[str, WorkerSleep | BatonError]:
        async def outcome(worker: str) -> WorkerSleep | BatonError:
            try:
                return await ask(worker)
            except BatonError as error:
                return error

        workers = [worker.worker_id for worker in (await self.status(model=model)).workers]
        return dict(zip(workers, await asyncio.gather(*map(outcome, workers)), strict=True))

    async def _ask(self, question: Callable[[RouterClient], Awaitable[T]], timeout_s: float | None = None) -> T:
        async with self._calling(timeout_s) as router:
            return await question(router)

    async def _pieces(
        self, request: pb.GenerateRequest, answer: Answer, timeout_s: float | None
    ) -> AsyncGenerator[Piece, None]:
        start_s = time.monotonic()
        async with self._calling(timeout_s) as router, aclosing(lasting(router, request, timeout_s)) as responses:
            async for response in responses:
                piece = answer.add(response, time.monotonic() - start_s)
                if piece is not None:
                    yield piece

    @asynccontextmanager
    async def _calling(self, timeout_s: float | None) -> AsyncIterator[RouterClient]:
        async with self._connecting:
            if self._router is None and not self._closed:
                router = await self._access.connect()
                if self._closed:
                    await router.close()
                else:
                    self._router = router
        if self._router is None or self._closed:
            raise UnavailableError(CLOSED)
        try:
            yield self._router
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not self._closed or task is None or task.cancelling():
                raise
            raise UnavailableError(CLOSED) from error  # gRPC's word for calls whose channel is closed
        except grpc.aio.AioRpcError as error:
            raise await self._access.meaning(error, timeout_s) from error


class AsyncStream:
    """The pieces of an answer as they come. Closing it, or leaving it as a context, cancels the request."""

    def __init__(self, answer: Answer, pieces: AsyncGenerator[Piece, None]) -> None:
        self.answer = answer  # as far as it has come
        self._pieces = pieces

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pieces.aclose()


def _secret(key: str | None, name: str) -> Secret | None:
    return None if key is None else parse_secrets(key, name)[0]
