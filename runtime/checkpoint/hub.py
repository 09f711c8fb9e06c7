"""A model that is named as on the Hugging Face Hub: taken from the local cache, or downloaded into it once.

The cache, its place (HF_HOME), the token (HF_TOKEN), a mirror (HF_ENDPOINT) and HF_HUB_OFFLINE are huggingface_hub's.
It is imported late, because the import takes 0.2 s and a folder needs none of it.
"""

import errno
import glob
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from runtime.errors import ModelError

_REPO = r"(?P<repo>\w[\w.-]*/\w[\w.-]*)"
_FILE = r"(?P<file>(?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf)"
_NAME = re.compile(rf"(?:hf://)?{_REPO}(?:@(?P<revision>refs/\w+/\w+|\w[\w./-]*?))?(?:/{_FILE})?")
_PAGE = re.compile(
    rf"https://(?:huggingface\.co|hf\.co)/{_REPO}"
    rf"(?:/tree/(?P<revision>\w[\w./-]*?)|/(?:blob|resolve)/(?P<of_file>refs/\w+/\w+|\w[\w.-]*)/{_FILE})?/?(?:\?.*)?"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str  # Qwen/Qwen3-0.6B
    revision: str  # branch, tag or commit
    file: str = ""  # a .gguf file of the repository, which is the model; empty: the repository is

    @property
    def plain(self) -> str:
        """Without the revision."""
        return f"{self.repo}/{self.file}" if self.file else self.repo

    def at(self, commit: str) -> str:
        return f"{self.repo}@{commit}/{self.file}" if self.file else f"{self.repo}@{commit}"


def hub_name(text: str) -> HubName | None:
    """`OWNER/MODEL`, `OWNER/MODEL@REVISION`, either of them with `/FILE.gguf`, also behind `hf://`, and the address of
    the model or of its file on huggingface.co; None for anything else."""
    match = _PAGE.fullmatch(text) or _NAME.fullmatch(text)
    if match is None or match["repo"].endswith(".gguf"):
        return None
    found = match.groupdict()
    return HubName(found["repo"], found["revision"] or found.get("of_file") or "main", found["file"] or "")


def hub_folder(name: HubName, small_files: Sequence[str], wanted: Callable[[Path], Sequence[str]]) -> Path:
    """The folder of one commit, whose name is the commit. The Hub is not asked when the cache holds all of it.

    wanted: gets the folder when it holds those of `small_files` that the model has; returns the files of weights that
    are needed. Raises ModelError, also when `wanted` raises it.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(name, small_files, wanted, cached=True)
    except (LocalEntryNotFoundError, ModelError):  # other programs fetch single files into the cache
        pass
    log.info("not in the cache yet: downloading", model=name.repo, revision=name.revision)
    try:
        folder = _snapshot(name, small_files, wanted, cached=False)
    except ModelError:
        raise
    except Exception as error:  # besides OSError those of the HTTP library, which is another in each huggingface_hub
        raise ModelError(name.repo, _problem(name, error)) from error
    for weights in wanted(folder):
        _verify(name, folder / weights)
    return folder


def hub_file(name: HubName) -> Path:
    """The file that the name has, as it lies in the folder of its commit. Raises ModelError."""
    path = hub_folder(name, [name.file], lambda _: [name.file]) / name.file
    if not path.is_file():
        raise ModelError(name.repo, f"has no file {name.file} at {name.revision}: name one of its .gguf files")
    return path


def _snapshot(
    name: HubName, small_files: Sequence[str], wanted: Callable[[Path], Sequence[str]], *, cached: bool
) -> Path:
    """`cached`: asks nobody, and raises LocalEntryNotFoundError when something is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    fetch = partial(snapshot_download, name.repo, local_files_only=cached)
    folder = Path(fetch(revision=name.revision, allow_patterns=list(small_files)))
    weights = wanted(folder)
    if weights:
        fetch(revision=folder.name, allow_patterns=[glob.escape(file) for file in weights])
    if cached and not all((folder / file).is_file() for file in weights):
        raise LocalEntryNotFoundError(f"{folder} has not all weights")
    return folder


def _verify(name: HubName, path: Path) -> None:
    """Compares a large file with its SHA-256, which is its name in the cache. Over plain HTTP huggingface_hub compares
    lengths alone. Raises ModelError."""
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name) or not blob.is_file():
        return
    with blob.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != blob.name:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise ModelError(name.repo, f"{path.name} came with other content than its checksum says: try again")


def _problem(name: HubName, error: Exception) -> str:
    """What went wrong, and the way out."""
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    login = "log in (`hf auth login`, or HF_TOKEN)"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    match error:
        case errors.GatedRepoError():
            return f"is gated: accept its terms at {hub}/{name.repo}, and {login}"
        case errors.RepositoryNotFoundError():
            return (
                f"is no folder here, and {hub} has no model of that name to show: give an existing folder or a name "
                f"from there; if the model is private, {login}"
            )
        case errors.RevisionNotFoundError():
            return f"has no revision {name.revision!r} on {hub}"
        case _ if status in (401, 403):
            return f"is not for the token that was shown to {hub}: {login} with one that may read it"
        case _ if constants.HF_HUB_OFFLINE:
            return (
                f"is no folder here and not, or not all of it, in {cache}; HF_HUB_OFFLINE forbids to download it: "
                "unset that, or give a folder"
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"is no folder here and not, or not all of it, in {cache}, and {hub} cannot be reached: check the "
                f"network, name a mirror in HF_ENDPOINT, or give a folder that was downloaded elsewhere"
            )
        case OSError(errno=errno.ENOSPC):
            return f"does not fit: no space left in {cache}; HF_HOME names another place"
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"could not be downloaded: {said}; try again, files that are complete stay in {cache}"
