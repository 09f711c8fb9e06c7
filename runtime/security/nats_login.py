"""The login of a process at NATS, and the part of a NATS URL that may be shown."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from runtime.address import is_address, is_loopback
from runtime.config.surroundings import NatsConfig
from runtime.errors import ConfigError
from runtime.security.cluster_key import NATS, ClusterKey, TlsMode
from runtime.security.secret import Secret, read_file, read_secrets

if TYPE_CHECKING:
    from runtime.security.internal_tls import InternalTls

CREDENTIALS_FIELD = "nats.credentials_file"
OWN_USER = "baton"
TLS_SCHEME = "tls"
USER_VARIABLE = "BATON_NATS_USER"
PASSWORD_VARIABLE = "BATON_NATS_PASSWORD"
CREDENTIALS_FILE_VARIABLE = "BATON_NATS_CREDENTIALS_FILE"
TOKEN_VARIABLE = "BATON_NATS_TOKEN"
VARIABLES = (USER_VARIABLE, PASSWORD_VARIABLE, CREDENTIALS_FILE_VARIABLE, TOKEN_VARIABLE)


@dataclass(frozen=True, slots=True)
class NatsLogin:
    """User and password, a token, or a .creds file; none of them where the server asks for nothing. `tls`: the server
    is the service's own and shows a certificate of the cluster."""

    user: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    credentials_file: str | None = None
    tls: "InternalTls | None" = None

    def variables(self) -> dict[str, str]:
        """Variables for a process that shall log in as this one does. A .creds file is not among them."""
        given = {
            USER_VARIABLE: self.user,
            PASSWORD_VARIABLE: None if self.password is None else self.password.reveal(),
            TOKEN_VARIABLE: None if self.token is None else self.token.reveal(),
        }
        return {name: value for name, value in given.items() if value is not None}

    def options(self) -> dict[str, Any]:
        """Arguments of nats.connect."""
        given = {
            "user": self.user,
            "password": self.password and self.password.reveal(),
            "token": self.token and self.token.reveal(),
            "user_credentials": self.credentials_file,
            "tls_hostname": self.tls and self.tls.name,
            # Else the server would greet first, and who changes the greeting could have the login sent in plain text.
            "tls_handshake_first": self.tls and True,
        }
        return {name: value for name, value in given.items() if value is not None}


NO_LOGIN = NatsLogin()


def find_login(config: NatsConfig, cluster: ClusterKey | None, environ: Mapping[str, str]) -> NatsLogin:
    """The first login that is given: in the URL, in the section `nats`, in a variable. Without any, the login derived
    from the cluster key, which the service's own server takes. Raises ConfigError."""
    login = _given_login(config, environ)
    if cluster is None:
        return login or NO_LOGIN
    _check_encrypted(config.url, cluster.mode)
    derived = NatsLogin(OWN_USER, cluster.derive(NATS))
    if login is not None and login.variables() != derived.variables():
        return login
    return replace(derived, tls=cluster.tls) if _is_ours(config.url) else derived


def _check_encrypted(url: str | None, mode: TlsMode) -> None:
    """Raises ConfigError where the processes of a service encrypt what goes between them, but not what goes to NATS."""
    if url is None or mode == "off":
        return
    parts = (urlsplit(one if "://" in one else f"//{one}") for one in each_url(url))
    plain = [one for one in parts if one.scheme != TLS_SCHEME]
    if not plain:
        return
    problem = f"security.internal_tls is `{mode}`, which wants {TLS_SCHEME}://"
    if mode == "on":
        raise ConfigError("nats.url", f"{problem}; with `auto` a NATS at 127.0.0.1 may do without")
    if not all(is_loopback(one.hostname or "") for one in plain):
        problem += " for a NATS on another machine as soon as workers.host is more than this one"
        raise ConfigError("nats.url", f"{problem}; `off` sends all in plain text")


def _given_login(config: NatsConfig, environ: Mapping[str, str]) -> NatsLogin | None:
    """Raises ConfigError."""
    if config.url is not None and (login := split_url(config.url)[1]):
        return login
    if credentials_file := config.credentials_file or environ.get(CREDENTIALS_FILE_VARIABLE):
        if "NATS USER JWT" in read_file(credentials_file, CREDENTIALS_FIELD):
            return NatsLogin(credentials_file=credentials_file)
        return NatsLogin(token=read_secrets(credentials_file, CREDENTIALS_FIELD)[0])
    if token := environ.get(TOKEN_VARIABLE):
        return NatsLogin(token=Secret(token))
    if user := environ.get(USER_VARIABLE):
        return NatsLogin(user, Secret(environ.get(PASSWORD_VARIABLE, "")))
    return None


def _is_ours(url: str | None) -> bool:
    """Whether a server with the derived login is the service's own: one to be started (None), or one with TLS that goes
    by its address. A server with a name has its certificate from somebody else."""
    if url is None:
        return True
    parts = map(urlsplit, each_url(url))
    return all(one.scheme == TLS_SCHEME and is_address(one.hostname or "") for one in parts)


def each_url(urls: str) -> list[str]:
    """The servers of one NATS: `urls` has commas between them."""
    return [url.strip() for url in urls.split(",")]


def split_url(urls: str) -> tuple[str, NatsLogin | None]:
    """The URLs without their login, which may be shown, and the first login; None: they hold none."""
    parts = [_split_one(url) for url in each_url(urls)]
    return ",".join(shown for shown, _ in parts), next((login for _, login in parts if login), None)


def _split_one(url: str) -> tuple[str, NatsLogin | None]:
    parts = urlsplit(url)
    login, at, place = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, colon, password = login.partition(":")
    shown = urlunsplit(parts._replace(netloc=place))
    if not colon:  # as NATS reads it
        return shown, NatsLogin(token=Secret(unquote(user)))
    return shown, NatsLogin(unquote(user), Secret(unquote(password)))
