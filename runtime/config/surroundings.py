"""Sections of serving.yaml on what surrounds each process: NATS, keys and logs."""

from typing import Literal

from msgspec import Struct

from runtime.config.types import NatsUrl, Text


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # nats://HOST:PORT or tls://HOST:PORT of a server with JetStream; of a cluster all of them, with commas between.
    # null: the service starts its own and ends it.
    url: NatsUrl | None = None
    # Servers that the service starts itself, on as many machines as there are. Of 3 or 5 one may die at a time, with
    # its machine: each stream lies on 3.
    servers: Literal[1, 3, 5] = 1
    # Folder of the own servers, in which nobody else may write. null: a temporary one.
    store_dir: Text | None = None
    # How to log in at `url`: a .creds file, or a file with a token. User and password stand in the variables
    # BATON_NATS_USER and BATON_NATS_PASSWORD. The own server asks for a password that comes of the cluster key.
    credentials_file: Text | None = None


class SecurityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of files, because no key stands in a configuration. runtime/security/keys.py lists the variables that may
    hold keys instead."""

    # Keys of the service's users, one per line (or BATON_API_KEY). The router's ports and all metrics ask for one of
    # them: `Authorization: Bearer KEY`. The file is read again when it has changed. null: nobody is asked.
    api_key_file: Text | None = None
    # true: whoever reaches the router may ask, without a key. false: a router.host beyond this machine wants keys of
    # clients.
    insecure: bool = False
    # In PEM form, for the router's ports: the certificate with those between it and its CA (tls_cert_file), and its key
    # (tls_key_file). null: no TLS.
    tls_cert_file: Text | None = None
    tls_key_file: Text | None = None
    # What the processes of one service, and of services that share a NATS and a namespace, know of each other: at least
    # 32 characters (or BATON_CLUSTER_KEY). null: `baton up` makes a new one for each run; a process that is started by
    # hand asks for none of these and listens on 127.0.0.1 alone.
    cluster_key_file: Text | None = None
    # Keys of the service's operators, one per line of at least 32 characters (or BATON_OPERATOR_KEY): `baton status`,
    # `sleep`, `scale` and the like show one of them. null: a key that is derived from the cluster key; a router without
    # a cluster key makes one, and logs the file. Commands of the user who runs the service find the key of a `baton up`
    # by themselves.
    operator_key_file: Text | None = None
    # TLS between the processes of the service: streams, the workers' gRPC, KV over TCP, the metrics of workers, and its
    # own NATS. Each process derives the same CA from the cluster key and issues its own certificate. `auto`: on when
    # workers.host is more than this machine; a NATS at nats.url on another machine has to be tls:// then. `on`: always;
    # KV then goes by NCCL, which does not encrypt, within a machine only, and any NATS at nats.url has to be tls://.
    # `off`: never.
    internal_tls: Literal["auto", "on", "off"] = "auto"


LogLevel = Literal["debug", "info", "warning", "error"]


class LoggingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # debug, info, warning or error. SIGHUP to `baton up` reads it again.
    level: LogLevel = "info"
    # console (key=value, for people) or json (one object per line).
    format: Literal["console", "json"] = "console"
    # A file to which each router appends a JSON line for each request that has ended: who asked (name of the key,
    # tenant), the model, and the tokens of the prompt, those of them that were cached, and of the answer. The file may
    # be moved away at any time. "-": stdout. null: no lines.
    usage: Text | None = None
