"""The keys of a process: those that it shows, and those that it asks for. They are read once, at its start.

A key that is not configured is not asked for, except the operator key: a router without any makes one. A process
without a cluster key listens on the loopback interface alone. `baton up` makes a cluster key for each run where none is
given.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.address import is_loopback
from runtime.config.serving import ServingConfig
from runtime.config.surroundings import SecurityConfig
from runtime.errors import ConfigError
from runtime.security import nats_login
from runtime.security.bearer_keys import FILE_FIELD, BearerKeys
from runtime.security.callers import Caller, parse_callers, read_callers
from runtime.security.cluster_key import OPERATOR, ClusterKey, TlsMode, new_cluster_key
from runtime.security.nats_login import NO_LOGIN, NatsLogin, find_login
from runtime.security.secret import HOW_TO_MAKE, MIN_LENGTH, Secret, parse_secrets, read_secrets

CLUSTER_KEY_VARIABLE = "BATON_CLUSTER_KEY"
API_KEY_VARIABLE = "BATON_API_KEY"
OPERATOR_KEY_VARIABLE = "BATON_OPERATOR_KEY"
OPERATOR_REMEDY = (
    "; commands of the service's user find it where the service runs, elsewhere it is given with --operator-key-file "
    "or BATON_OPERATOR_KEY"
)
VARIABLES = (CLUSTER_KEY_VARIABLE, API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, *nats_login.VARIABLES)


@dataclass(frozen=True, slots=True)
class Keys:
    cluster: ClusterKey | None = None
    api: BearerKeys | None = None  # what the public ports and the metrics take
    nats: NatsLogin = NO_LOGIN
    operator: tuple[Secret, ...] = ()  # what `baton.v1.Admin` and the planner's orders take; our own commands show [0]


NO_KEYS = Keys()


def load_keys(config: ServingConfig, environ: Mapping[str, str] = os.environ) -> Keys:
    """Raises ConfigError."""
    keys = _load_keys(config, environ)
    if keys.cluster is None and tls_mode(config) == "on":
        problem = f"`on` wants a cluster key: security.cluster_key_file or {CLUSTER_KEY_VARIABLE}"
        raise ConfigError("security.internal_tls", problem)
    return keys


def _load_keys(config: ServingConfig, environ: Mapping[str, str]) -> Keys:
    cluster = find_cluster_key(config, environ)
    api_keys = _api_keys(config.security, environ)
    api = BearerKeys(api_keys, config.security.api_key_file) if api_keys else None
    operator = _operator_keys(config.security, cluster, environ)
    return Keys(cluster, api, find_login(config.nats, cluster, environ), operator)


def load_or_make_keys(config: ServingConfig, environ: Mapping[str, str] = os.environ) -> Keys:
    """The keys for a supervisor: with a fresh cluster key where none is given. Raises ConfigError."""
    keys = _load_keys(config, environ)
    if keys.cluster is None:
        cluster = new_cluster_key(tls_mode(config))
        operator = _operator_keys(config.security, cluster, environ)
        keys = replace(keys, cluster=cluster, nats=find_login(config.nats, cluster, environ), operator=operator)
    if config.nats.url is None and keys.nats.password is None:
        raise ConfigError("nats.url", "a token or .creds file is given, but not the NATS that takes it")
    check_callers(config, keys)
    return keys


def find_cluster_key(config: ServingConfig, environ: Mapping[str, str] = os.environ) -> ClusterKey | None:
    """Raises ConfigError."""
    path, mode = config.security.cluster_key_file, tls_mode(config)
    if path is not None:
        return ClusterKey(read_secrets(path, "security.cluster_key_file", MIN_LENGTH)[0], mode)
    if key := environ.get(CLUSTER_KEY_VARIABLE):
        return ClusterKey(parse_secrets(key, CLUSTER_KEY_VARIABLE, MIN_LENGTH)[0], mode)
    return None


def tls_mode(config: ServingConfig) -> TlsMode:
    """What `security.internal_tls` means for this configuration: `auto` becomes `off` where nobody else can listen."""
    wanted = config.security.internal_tls
    # Every port that is meant here is on this host. TLS makes a stream's message cost 5 times as much CPU.
    return "off" if wanted == "auto" and is_loopback(config.workers.host) else wanted


def handed_on(keys: Keys, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for the other processes of the service: the secret ones of `environ`, which `keys` came from, and the
    derived ones. Keys in files are not among them, because each process reads the files."""
    cluster = {} if keys.cluster is None else {CLUSTER_KEY_VARIABLE: keys.cluster.secret.reveal()}
    return given(environ) | cluster | keys.nats.variables()


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that hold keys."""
    return {name: environ[name] for name in VARIABLES if environ.get(name)}


def check_reach(field: str, host: str, keys: Keys) -> None:
    """Raises ConfigError when other machines could reach a process that asks for no key."""
    if keys.cluster is None and not is_loopback(host):
        problem = f"{host!r} is more than this machine, which asks for a cluster key"
        raise ConfigError(field, f"{problem}: security.cluster_key_file or {CLUSTER_KEY_VARIABLE}")


def check_callers(config: ServingConfig, keys: Keys) -> None:
    """Raises ConfigError when other machines could ask for text without a key and nobody has said that they may."""
    host = config.router.host
    if keys.api is None and not is_loopback(host) and not config.security.insecure:
        problem = f"{host!r} is more than this machine, and anybody there could ask: clients need a key"
        ways = f"security.api_key_file or {API_KEY_VARIABLE}, {HOW_TO_MAKE}"
        raise ConfigError("router.host", f"{problem} ({ways}), or security.insecure: true lets all ask")


def _operator_keys(
    config: SecurityConfig, cluster: ClusterKey | None, environ: Mapping[str, str]
) -> tuple[Secret, ...]:
    """Those that are given, or else one that is derived from the cluster key."""
    if config.operator_key_file is not None:
        return tuple(read_secrets(config.operator_key_file, "security.operator_key_file", MIN_LENGTH))
    if keys := environ.get(OPERATOR_KEY_VARIABLE):
        return tuple(parse_secrets(keys, OPERATOR_KEY_VARIABLE, MIN_LENGTH))
    return () if cluster is None else (cluster.derive(OPERATOR),)


def _api_keys(config: SecurityConfig, environ: Mapping[str, str]) -> list[tuple[Secret, Caller]]:
    if config.api_key_file is not None:
        return read_callers(config.api_key_file, FILE_FIELD)
    if keys := environ.get(API_KEY_VARIABLE):
        return parse_callers(keys, API_KEY_VARIABLE, MIN_LENGTH)
    return []
