"""TLS between the processes of a service, in both directions: each end shows a certificate of the cluster's CA.

A certificate is valid for a day and issued anew when half of the day is over, by whoever asks for a context next. The
clock is looked at in each handshake, so nothing has to run in the background and no connection is disturbed.
"""

import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import grpc

from runtime.security.cluster_ca import LIFETIME, NAME, ClusterCa
from runtime.security.contexts import Pair, following, following_credentials

RENEW_AFTER: Final = LIFETIME / 2


class InternalTls:
    """`seed`: of the CA. `now`: the time, with a time zone. Any thread."""

    name: Final = NAME  # that a client has to ask for
    grpc_options: Final = (("grpc.ssl_target_name_override", NAME),)  # of a client

    def __init__(self, seed: bytes, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._now = now
        self._ca = ClusterCa(seed)
        self._lock = threading.Lock()
        self._issue()

    @property
    def authority(self) -> bytes:
        """The CA's certificate in PEM form."""
        return self._ca.certificate

    def pair(self) -> Pair:
        """Our certificate and key as they are now."""
        with self._lock:
            if abs(self._now() - self._issued) >= RENEW_AFTER:  # before the issue: the clock was set back
                self._issue()
            return self._pair

    def client(self) -> ssl.SSLContext:
        """For one connection that we open; the server's name is `name`."""
        self.pair()
        return self._client

    def server(self) -> ssl.SSLContext:
        """For one connection that we accept."""
        self.pair()
        return self._server

    def listener(self, *, ask: bool = True) -> ssl.SSLContext:
        """For a listener, however long it lives. `ask`: clients have to show a certificate of this CA."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        if not ask:
            context.verify_mode = ssl.CERT_NONE
        return following(context, self.server)

    def grpc_server(self) -> grpc.ServerCredentials:
        return following_credentials(self.pair, self.authority)

    def grpc_client(self) -> grpc.ChannelCredentials:
        """For a channel that is made anew when `pair` is another one. It wants `grpc_options`."""
        pair = self.pair()
        return grpc.ssl_channel_credentials(self.authority, pair.key, pair.certificate)

    def _issue(self) -> None:
        self._issued = self._now()
        self._pair = self._ca.issue(self._issued)
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: "ssl._SSLMethod") -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        if protocol is ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nobody resumes a session
        self._pair.load_into(context)
        return context
