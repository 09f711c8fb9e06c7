"""Where a running service leaves its cluster key for commands of the same user on the same machine.

There is one file of mode 0600 per NATS server and namespace, in a folder of mode 0700. Only somebody who could read the
memory of the service can read it. The file is removed at the service's end, or by the next service after a kill.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import structlog

from runtime.config.serving import NatsConfig
from runtime.security.cluster_key import MIN_LENGTH, ClusterKey, TlsMode
from runtime.security.keys import CLUSTER_KEY_VARIABLE, Keys
from runtime.security.nats_login import TLS_SCHEME, find_login, split_url
from runtime.security.secret import parse_secrets

SUFFIX = ".key"

log = structlog.get_logger()


@contextmanager
def key_left(url: str, namespace: str, key: ClusterKey) -> Iterator[None]:
    """Leaves the key in a file until the end of the context. Where no file can be written, a warning is logged, and
    commands need the key as a variable."""
    path = None
    try:
        path = _path(_folder(create=True), url, namespace)
        _clear_away_the_dead(path.parent)
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{key.secret.reveal()}\n{os.getpid()}\n")
    except OSError as error:
        log.warning("commands on this machine will want the cluster key", variable=CLUSTER_KEY_VARIABLE, why=str(error))
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def find_keys(url: str, namespace: str, environ: Mapping[str, str] = os.environ) -> Keys:
    """The keys of a command without a configuration: from variables, or from the file that a service has left. Raises
    ConfigError."""
    key = environ.get(CLUSTER_KEY_VARIABLE) or _left(url, namespace)
    mode: TlsMode = "auto" if urlsplit(url).scheme == TLS_SCHEME else "off"
    cluster = ClusterKey(parse_secrets(key, CLUSTER_KEY_VARIABLE, MIN_LENGTH)[0], mode) if key else None
    return Keys(cluster, nats=find_login(NatsConfig(url=url), cluster, environ))


def _left(url: str, namespace: str) -> str | None:
    try:
        return _path(_folder(), url, namespace).read_text().split()[0]
    except (OSError, IndexError):
        return None


def _folder(create: bool = False) -> Path:
    """Raises OSError when there is no folder, or when another user could read it or could have made it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        folder = Path(runtime) / "baton"
    else:
        folder = Path(tempfile.gettempdir()) / f"baton-{os.geteuid()}"
    if create:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    stat = folder.lstat()
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours alone")
    return folder


def _path(folder: Path, url: str, namespace: str) -> Path:
    """Raises OSError when the URL names no host and port."""
    parts = urlsplit(split_url(url)[0])
    try:
        host, port = parts.hostname, parts.port or 4222
    except ValueError as error:
        raise OSError(f"no key can belong to {url!r}: {error}") from error
    host = "127.0.0.1" if host in (None, "localhost") else host
    return folder / f"{host}_{port}_{namespace}{SUFFIX}"


def _clear_away_the_dead(folder: Path) -> None:
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(path.read_text().split()[1])
            if not psutil.pid_exists(pid):
                path.unlink()
