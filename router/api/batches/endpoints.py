"""The paths of files and batches. A caller sees what callers of the same tenant have brought, and nothing else."""

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from router.api.batches.form import Form
from router.api.dialects.json_body import decode_body
from router.api.dialects.plain_request import admit, enter_tenant
from router.api.http.body import received_body
from router.api.http.disconnect import NOBODY
from router.api.http.errors import ErrorAnswer, ErrorBody, error_response
from router.api.http.json_response import json_response
from router.api.http.key_guard import CALLER
from router.api.pages.openapi import Described
from router.api.wishes.names import Name, check_name
from router.api.wishes.validation import make_request_id
from router.batches.folder import FIELD, BatchFolder, TenantFolder
from router.batches.records import MAX_METADATA, Batch, FileId, StoredBatch, StoredFile, new_id
from router.requests.frontend import Models
from runtime.errors import BodyTooLargeError, InvalidRequestError, shown
from runtime.security.callers import ANYONE

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MAX_FILE_BYTES: Final = 200 << 20  # as at OpenAI
WRITE_BYTES: Final = 256 << 10  # of an upload, in memory
PURPOSE: Final = "batch"
MAX_WINDOW_S: Final = 7 * 86400
_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_PAGE: Final = 10_000

Answer = Callable[[Request, str], Coroutine[Any, Any, Response]]


class MissingError(InvalidRequestError):
    """Nothing of this id is there, or nothing that this caller may see."""


class BatchBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    not_served: ClassVar[Mapping[str, Sequence[Any]]] = {"output_expires_after": ()}

    input_file_id: FileId
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Name, Name], Meta(max_length=MAX_METADATA)] | None = None
    output_expires_after: Any = None


DESCRIBED: Mapping[str, Described] = {"/v1/batches": ("Begins a batch of requests", BatchBody, Batch)}


class BatchEndpoints:
    """`folder` None: all is refused with the setting that is missing. `begun` is called when there is a new batch, or
    one was cancelled."""

    def __init__(self, models: Models, folder: BatchFolder | None, begun: Callable[[], None]) -> None:
        self._models = models
        self._folder = folder
        self._begun = begun
        self.served: Collection[str] = ENDPOINTS  # paths of the application

    def routes(self) -> list[Route]:
        def route(method: str, path: str, answer: Answer) -> Route:
            return Route(path, partial(self._answered, answer), methods=[method])

        return [
            route("POST", "/v1/files", self._upload),
            route("GET", "/v1/files", self._list_files),
            route("GET", "/v1/files/{id}", self._file),
            route("DELETE", "/v1/files/{id}", self._delete_file),
            route("GET", "/v1/files/{id}/content", self._content),
            route("POST", "/v1/batches", self._begin),
            route("GET", "/v1/batches", self._list_batches),
            route("GET", "/v1/batches/{id}", self._batch),
            route("POST", "/v1/batches/{id}/cancel", self._cancel),
        ]

    async def _answered(self, answer: Answer, http: Request) -> Response:
        try:
            if self._folder is None:
                raise MissingError(FIELD, "names no folder, so this service keeps no files and runs no batches")
            tenant = enter_tenant(http)
            if http.method == "POST":
                admit(self._models, http)
            return await answer(http, tenant)
        except MissingError as error:
            return json_response(ErrorAnswer(ErrorBody(str(error), "invalid_request_error", error.field)), 404)
        except ClientDisconnect:
            return NOBODY
        except Exception as error:
            return error_response(error, make_request_id(None)[0])

    def _of(self, tenant: str) -> TenantFolder:
        assert self._folder is not None
        return self._folder.of(tenant)

    # --- files --------------------------------------------------------------------------------------------------------

    async def _upload(self, http: Request, tenant: str) -> Response:
        assert self._folder is not None
        await asyncio.to_thread(self._folder.check_room)
        path = self._folder.uploads / new_id("")
        try:
            with self._models.bodies.hold(tenant) as held:
                held.become(WRITE_BYTES)
                form = await _received(http, path)
            unknown = form.fields.keys() - {"purpose"}
            if unknown and self._models.config.unknown_fields == "refuse":
                raise InvalidRequestError(sorted(unknown)[0], "is not supported; leave it out")
            if (purpose := form.fields.get("purpose")) != PURPOSE:
                raise InvalidRequestError("purpose", f"is {shown(purpose)}, must be {PURPOSE!r}")
            name = check_name("file", form.filename or "")
            return json_response(await asyncio.to_thread(self._of(tenant).take_in, path, name, PURPOSE))
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def _list_files(self, http: Request, tenant: str) -> Response:
        folder, wanted = self._of(tenant), http.query_params.get("purpose")

        def read(file_id: str) -> StoredFile | None:
            file = folder.file(file_id)
            return file if file is not None and wanted in (None, file.purpose) else None

        return await _page(http, folder.files, read, MAX_PAGE)

    async def _file(self, http: Request, tenant: str) -> Response:
        return json_response(await _found(http, self._of(tenant).file))

    async def _delete_file(self, http: Request, tenant: str) -> Response:
        folder = self._of(tenant)
        file = await _found(http, folder.file)
        await asyncio.to_thread(folder.delete_file, file.id)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def _content(self, http: Request, tenant: str) -> Response:
        folder = self._of(tenant)
        file = await _found(http, folder.file)
        return FileResponse(folder.data(file.id), media_type="application/octet-stream")

    # --- batches ------------------------------------------------------------------------------------------------------

    async def _begin(self, http: Request, tenant: str) -> Response:
        assert self._folder is not None
        with self._models.bodies.hold(tenant) as held:
            body = decode_body(await received_body(http, self._models.config.max_body_bytes, held), BatchBody)
        served = [path for path in ENDPOINTS if path in self.served]
        if body.endpoint not in served:
            raise InvalidRequestError("endpoint", f"is {shown(body.endpoint)}, must be one of {', '.join(served)}")
        window_s = _seconds(body.completion_window)
        if await asyncio.to_thread(self._of(tenant).file, body.input_file_id) is None:
            raise InvalidRequestError("input_file_id", f"there is no file {body.input_file_id!r}")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=body.metadata,
        )
        key = http.scope.get(CALLER, ANYONE).key
        stored = StoredBatch(batch=batch, tenant=tenant, key=key, output=new_id("file-"), errors=new_id("file-"))
        await asyncio.to_thread(self._folder.begin, stored)
        self._begun()
        return json_response(batch)

    async def _list_batches(self, http: Request, tenant: str) -> Response:
        folder = self._of(tenant)
        return await _page(http, folder.batches, folder.batch, 20)

    async def _batch(self, http: Request, tenant: str) -> Response:
        return json_response(await _found(http, self._of(tenant).batch))

    async def _cancel(self, http: Request, tenant: str) -> Response:
        folder = self._of(tenant)
        batch = await _found(http, folder.batch)
        if batch.is_open:
            await asyncio.to_thread(folder.cancel, batch.id)
            self._begun()
            return json_response(batch.cancelling())
        if batch.status in ("cancelling", "cancelled"):
            return json_response(batch)
        raise InvalidRequestError("batch_id", f"has the status {batch.status!r}: there is nothing left to cancel")


async def _received(http: Request, path: Path) -> Form:
    """Writes the file of a form to `path`. Raises InvalidRequestError, ClientDisconnect, OSError."""
    pending, size = bytearray(), 0
    form = Form(http.headers.get("content-type", ""), pending.extend)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        async for chunk in http.stream():
            form.feed(chunk)
            if size + len(pending) > MAX_FILE_BYTES:
                raise BodyTooLargeError(MAX_FILE_BYTES)
            if len(pending) >= WRITE_BYTES or (form.is_whole and pending):
                size += len(pending)
                await asyncio.to_thread(file.write, bytes(pending))
                pending.clear()
    if not form.is_whole or form.filename is None:
        raise InvalidRequestError("file", "is missing, or the form has no end")
    return form


def _seconds(window: str) -> int:
    """Raises InvalidRequestError."""
    read = _WINDOW.fullmatch(window)
    seconds = 0 if read is None else int(read[1]) * _UNITS[read[2]]
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequestError("completion_window", f"is {shown(window)}, must be a time up to 7d, such as '24h'")
    return seconds


async def _found(http: Request, read: Callable[[str], Any]) -> Any:
    """Raises MissingError."""
    name = http.path_params["id"]
    found = await asyncio.to_thread(read, name)
    if found is None:
        raise MissingError("id", f"there is no {shown(name)}")
    return found


async def _page(http: Request, ids: Callable[[], list[str]], read: Callable[[str], Any], usual: int) -> Response:
    """A list as OpenAI has them, the newest first unless `order` says otherwise. Raises InvalidRequestError."""
    limit, after = http.query_params.get("limit", str(usual)), http.query_params.get("after")
    if not limit.isdecimal() or not 0 < int(limit) <= MAX_PAGE:
        raise InvalidRequestError("limit", f"is {shown(limit)}, must be a number from 1 to {MAX_PAGE}")

    def read_page() -> tuple[list[Any], bool]:
        known = ids() if http.query_params.get("order") == "asc" else ids()[::-1]
        if after in known:
            known = known[known.index(after) + 1 :]
        found = [each for each in map(read, known[: int(limit)]) if each is not None]
        return found, len(known) > int(limit)

    return json_response(_listed(*await asyncio.to_thread(read_page)))


def _listed(found: list[Any], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": found[0].id, "last_id": found[-1].id} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, **ends, "has_more": has_more}
