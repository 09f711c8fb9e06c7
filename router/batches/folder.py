"""The folder of files and batches, which all routers of a service share. Its methods read and write disks: they belong
in threads.

    active/BATCH                      an open batch: the name of its tenant's folder; whoever works on it has it locked
    uploads/                          what is on its way in
    tenants/TENANT/files/FILE[.json]  contents, and what callers see of them; without .json they are being written
    tenants/TENANT/batches/BATCH.json, BATCH.cancel

A tenant is a hash of its name. Each file but the contents is replaced at once.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

import msgspec
from msgspec import Struct

from router.batches.records import Batch, StoredBatch, StoredFile, new_id
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.own_files import SEEN, as_config_error, opened_folder
from runtime.processes.owned_folder import write_private

FIELD: Final = "router.batch_folder"
MAX_FILES: Final = 1000  # of a tenant
MAX_OPEN: Final = 100  # batches of a tenant
MAX_ENDED: Final = 1000  # batches of a tenant that are remembered
MIN_FREE_BYTES: Final = 1 << 30  # of the disk, without which nothing is taken in
STALE_S: Final = 3600.0  # after which a file in `uploads` is one that its router has not lived to take in
ID: Final = re.compile(r"(file-|batch_)[0-9a-f]{32}")

Record = TypeVar("Record", bound=Struct)


class Lease:
    """An open batch is this router's alone, until end(), or until the process ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self._path, self._lock = path, lock

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """None: another router has it, or it has ended."""
        try:
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), path.stat()):
                return cls(path, lock)
        os.close(lock)
        return None

    def end(self, *, is_over: bool) -> None:
        """`is_over`: nobody needs to work on the batch any more."""
        if is_over:
            self._path.unlink(missing_ok=True)
        os.close(self._lock)


class TenantFolder:
    def __init__(self, path: Path) -> None:
        self._files, self._batches = path / "files", path / "batches"

    def data(self, file_id: str) -> Path:
        return self._files / file_id

    def files(self) -> list[str]:
        """Ids, the oldest first."""
        return _ids(self._files)

    def batches(self) -> list[str]:
        """Ids, the oldest first."""
        return _ids(self._batches)

    def file(self, file_id: str) -> StoredFile | None:
        return _read(self._files, file_id, StoredFile)

    def batch(self, batch_id: str) -> Batch | None:
        """As callers see it."""
        stored = self.stored_batch(batch_id)
        if stored is None:
            return None
        return stored.batch.cancelling() if stored.batch.is_open and self.is_cancelled(batch_id) else stored.batch

    def stored_batch(self, batch_id: str) -> StoredBatch | None:
        return _read(self._batches, batch_id, StoredBatch)

    def take_in(self, upload: Path, filename: str, purpose: str) -> StoredFile:
        """Raises InvalidRequestError."""
        self._files.mkdir(parents=True, exist_ok=True)
        if len(self.files()) >= MAX_FILES:
            raise InvalidRequestError("file", f"is one too many: {MAX_FILES} are kept; delete some")
        file_id = new_id("file-")
        upload.rename(self.data(file_id))
        return self.show(file_id, filename, purpose)

    def show(self, file_id: str, filename: str, purpose: str) -> StoredFile:
        """From now on callers see the file."""
        size, now = self.data(file_id).stat().st_size, int(time.time())
        shown = StoredFile(id=file_id, bytes=size, created_at=now, filename=filename, purpose=purpose)
        _write(self._files, file_id, shown)
        return shown

    def delete_file(self, file_id: str) -> bool:
        if self.file(file_id) is None:
            return False
        _record(self._files, file_id).unlink(missing_ok=True)
        self.data(file_id).unlink(missing_ok=True)
        return True

    def begin_batch(self, stored: StoredBatch) -> None:
        """Raises InvalidRequestError. Forgets the oldest batch of many that have ended."""
        self._batches.mkdir(parents=True, exist_ok=True)
        known = [found.batch for each in self.batches() if (found := self.stored_batch(each)) is not None]
        if sum(batch.is_open for batch in known) >= MAX_OPEN:
            raise InvalidRequestError("input_file_id", f"{MAX_OPEN} batches wait or run already: cancel some, or wait")
        ended = [batch for batch in known if not batch.is_open]
        for batch in ended[: max(0, len(ended) - MAX_ENDED)]:
            _record(self._batches, batch.id).unlink(missing_ok=True)
        self.save_batch(stored)

    def save_batch(self, stored: StoredBatch) -> None:
        _write(self._batches, stored.batch.id, stored)

    def cancel(self, batch_id: str) -> None:
        (self._batches / f"{batch_id}.cancel").touch()

    def is_cancelled(self, batch_id: str) -> bool:
        return (self._batches / f"{batch_id}.cancel").exists()

    def end_batch(self, stored: StoredBatch) -> None:
        self.save_batch(stored)
        (self._batches / f"{stored.batch.id}.cancel").unlink(missing_ok=True)


class OpenBatch(NamedTuple):
    id: str
    tenant: str  # the name of the folder
    folder: TenantFolder
    is_cancelled: bool


class BatchFolder:
    def __init__(self, root: Path) -> None:
        """Raises ConfigError."""
        self._active, self.uploads, self._tenants = (root / name for name in ("active", "uploads", "tenants"))
        with as_config_error(root, FIELD), opened_folder(root, taboo=SEEN):  # prompts and answers lie here
            for folder in (self._active, self.uploads, self._tenants):
                folder.mkdir(exist_ok=True)
            for left in self.uploads.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - left.stat().st_mtime > STALE_S:
                        left.unlink()

    def of(self, tenant: str) -> TenantFolder:
        return TenantFolder(self._tenants / _folder_name(tenant))

    def check_room(self) -> None:
        """Raises UnavailableError."""
        if shutil.disk_usage(self._tenants).free < MIN_FREE_BYTES:
            raise UnavailableError("the disk of router.batch_folder is full: delete files, or try again later")

    def begin(self, stored: StoredBatch) -> None:
        """Raises InvalidRequestError, OSError. A batch that is listed here alone was never told to its caller."""
        write_private(self._active / stored.batch.id, _folder_name(stored.tenant))
        self.of(stored.tenant).begin_batch(stored)

    def open_batches(self) -> list[OpenBatch]:
        """The oldest first."""
        found = []
        for batch_id in sorted(filter(ID.fullmatch, os.listdir(self._active))):
            with contextlib.suppress(FileNotFoundError):
                name = (self._active / batch_id).read_text()
                folder = TenantFolder(self._tenants / name)
                found.append(OpenBatch(batch_id, name, folder, folder.is_cancelled(batch_id)))
        return found

    def lease(self, batch_id: str) -> Lease | None:
        return Lease.take(self._active / batch_id)


def _folder_name(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()


def _record(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _ids(folder: Path) -> list[str]:
    names = [name.removesuffix(".json") for name in _listed(folder) if name.endswith(".json")]
    return sorted(filter(ID.fullmatch, names))


def _listed(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def _read(folder: Path, name: str, kind: type[Record]) -> Record | None:
    """None: there is none, or `name` is no id."""
    if not ID.fullmatch(name):
        return None
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(_record(folder, name).read_bytes(), type=kind)
    return None


def _write(folder: Path, name: str, record: Struct) -> None:
    write_private(_record(folder, name), msgspec.json.encode(record).decode())
