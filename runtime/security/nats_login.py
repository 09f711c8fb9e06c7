"""The login of a process at NATS, and the part of a NATS URL that may be shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from runtime.config.serving import NatsConfig
from runtime.errors import ConfigError
from runtime.security.cluster_key import NATS, ClusterKey
from runtime.security.secret import Secret, read_file, read_secrets

CREDENTIALS_FIELD = "nats.credentials_file"
OWN_USER = "baton"
USER_VARIABLE = "BATON_NATS_USER"
PASSWORD_VARIABLE = "BATON_NATS_PASSWORD"
CREDENTIALS_FILE_VARIABLE = "BATON_NATS_CREDENTIALS_FILE"
TOKEN_VARIABLE = "BATON_NATS_TOKEN"
VARIABLES = (USER_VARIABLE, PASSWORD_VARIABLE, CREDENTIALS_FILE_VARIABLE, TOKEN_VARIABLE)


@dataclass(frozen=True, slots=True)
class NatsLogin:
    """User and password, a token, or a .creds file; no field is set where the server asks for nothing."""

    user: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    credentials_file: str | None = None

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
        }
        return {name: value for name, value in given.items() if value is not None}


NO_LOGIN = NatsLogin()


def find_login(config: NatsConfig, cluster: ClusterKey | None, environ: Mapping[str, str]) -> NatsLogin:
    """The first login that is given: in the URL, in the section `nats`, in a variable. Without any, the login derived
    from the cluster key, which the service's own server takes. Raises ConfigError."""
    if config.url is not None and (login := split_url(config.url)[1]):
        return login
    if config.credentials_file and config.token_file:
        raise ConfigError("nats.token_file", "nats.credentials_file is given too; one of them is enough")
    if config.token_file:
        return NatsLogin(token=read_secrets(config.token_file, "nats.token_file")[0])
    if credentials_file := config.credentials_file or environ.get(CREDENTIALS_FILE_VARIABLE):
        if "NATS USER JWT" not in read_file(credentials_file, CREDENTIALS_FIELD):
            raise ConfigError(CREDENTIALS_FIELD, f"{credentials_file}: is no .creds file of NATS")
        return NatsLogin(credentials_file=credentials_file)
    if token := environ.get(TOKEN_VARIABLE):
        return NatsLogin(token=Secret(token))
    if user := environ.get(USER_VARIABLE):
        return NatsLogin(user, Secret(environ.get(PASSWORD_VARIABLE, "")))
    return NO_LOGIN if cluster is None else NatsLogin(OWN_USER, cluster.derive(NATS))


def split_url(url: str) -> tuple[str, NatsLogin | None]:
    """The URL without its login, which may be shown, and the login; None: the URL holds none."""
    parts = urlsplit(url)
    login, at, place = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, colon, password = login.partition(":")
    shown = urlunsplit(parts._replace(netloc=place))
    if not colon:  # as NATS reads it
        return shown, NatsLogin(token=Secret(unquote(user)))
    return shown, NatsLogin(unquote(user), Secret(unquote(password)))
