"""Files and batches as OpenAI has them, and as they lie in the folder."""

import secrets
import time
from typing import Annotated, Final, Literal

from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

FileId = Annotated[str, Meta(pattern=r"^file-[0-9a-f]{32}\Z")]
Status = Literal["validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled", "failed"]
MAX_METADATA: Final = 16


class StoredFile(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class Counts(Struct, frozen=True):
    """Of a batch's lines. `completed`: those in the output file; `failed`: those in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Fault(Struct, frozen=True):
    """Why a batch as a whole has failed."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Faults(Struct, frozen=True):
    data: list[Fault]
    object: str = "list"


class Batch(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: Faults | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    metadata: dict[str, str] | None = None

    @property
    def is_open(self) -> bool:
        return self.status in ("validating", "in_progress")

    def cancelling(self) -> "Batch":
        """As callers see an open batch that somebody has cancelled."""
        return replace(self, status="cancelling", cancelling_at=self.cancelling_at or int(time.time()))

    def ended(self, how: Ending, counts: Counts, output: str | None, errors: str | None) -> "Batch":
        now = int(time.time())
        at = {f"{how}_at": now, "finalizing_at": now}
        return replace(self, status=how, request_counts=counts, output_file_id=output, error_file_id=errors, **at)


class StoredBatch(Struct, frozen=True, kw_only=True):
    """A batch, and what only routers know of it."""

    batch: Batch
    tenant: str
    key: str  # the name of the key that the caller has shown; empty: none was asked for
    output: str  # ids of the files that are being written, which nobody sees before the batch has ended
    errors: str


class InputLine(Struct, frozen=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: Raw


class Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True):
    code: str
    message: str


class OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: Response | None = None
    error: LineError | None = None


def new_id(kind: str) -> str:
    """Ids of a kind are in the order in which they were made."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(8)}"
