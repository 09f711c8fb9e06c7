"""TLS contexts of certificates that change while their users live."""

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate, with those between it and its CA, and its key. Both in PEM form."""

    certificate: bytes
    key: bytes

    def load_into(self, context: ssl.SSLContext) -> None:
        """Raises ssl.SSLError when certificate and key cannot be used together."""
        with _MemoryFile(self.certificate) as certificate, _MemoryFile(self.key) as key:
            context.load_cert_chain(certificate, key, password=lambda: "")  # never asks on a terminal


class _MemoryFile:
    """Bytes under a path, because `ssl` reads keys from files only. No disk sees them."""

    def __init__(self, data: bytes) -> None:
        self._fd = os.memfd_create("pem", os.MFD_CLOEXEC)
        with open(self._fd, "wb", closefd=False) as file:
            file.write(data)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def following(context: ssl.SSLContext, current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """`context`, a listener's, made to show in each handshake the certificate that `current()` has at that moment.
    OpenSSL has a hook there, by which a server chooses its certificate. `current` must not raise."""

    def choose(connection: ssl.SSLObject, name: str | None, original: ssl.SSLContext) -> None:
        connection.context = current()

    context.sni_callback = choose
    return context


def following_credentials(pair: Callable[[], Pair], authority: bytes | None = None) -> grpc.ServerCredentials:
    """The same for a gRPC server, which shows what `pair()` is in each handshake. With `authority` (PEM), callers have
    to show a certificate of that CA."""

    def current() -> grpc.ServerCertificateConfiguration:
        now = pair()
        return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], authority)

    return grpc.dynamic_ssl_server_credentials(current(), current, require_client_authentication=authority is not None)
