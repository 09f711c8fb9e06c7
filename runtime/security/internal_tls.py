"""TLS between the processes of a service, in both directions: each end shows a certificate of the cluster's CA.

Each process derives the same certificate authority (CA) from the cluster key and issues its own certificate, so that no
file has to travel. A certificate is valid for a day and issued anew when half of the day is over, by whoever asks for a
context next. The clock is looked at in each handshake, so nothing has to run in the background and no connection is
disturbed.
"""

import hashlib
import ipaddress
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.security.contexts import Pair, following, following_credentials

NAME: Final = "baton.internal"  # the one that every process goes by; the CA tells clusters apart
LIFETIME: Final = timedelta(days=1)  # before and after the issue, because the clocks of two machines differ
RENEW_AFTER: Final = LIFETIME / 2
_CURVE_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_CA_TIMES: Final = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))


class ClusterCa:
    """`seed`: 32 secret bytes. Because signatures are random, the certificates of two processes' CAs differ in a few
    bytes; name and key, which are what counts, are the same."""

    def __init__(self, seed: bytes) -> None:
        number = int.from_bytes(seed, "big") % (_CURVE_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        point = self._key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        self._name = _named(f"Baton cluster {hashlib.sha256(point).hexdigest()[:12]}")
        self._own = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._signed(self._name, self._key.public_key(), _CA_TIMES, is_ca=True)

    def issue(self, now: datetime, address: str = "") -> Pair:
        """This process's key with a certificate for servers and for clients, which may also go by an IP address."""
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        also = [x509.IPAddress(ipaddress.ip_address(address))] if address else []
        names = x509.SubjectAlternativeName([x509.DNSName(NAME), *also])
        times = (now - LIFETIME, now + LIFETIME)
        certificate = self._signed(_named(NAME), self._own.public_key(), times, purposes, names)
        return Pair(certificate, self._own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        times: tuple[datetime, datetime],
        *extensions: x509.ExtensionType,
        is_ca: bool = False,
    ) -> bytes:
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number(), *times)
        builder = builder.add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


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

    def pair_of(self, address: str) -> Pair:
        """`pair`, with a certificate that also names the address, for servers that are asked by it."""
        self.pair()
        return self._ca.issue(self._issued, address)

    def client(self) -> ssl.SSLContext:
        """The context for one connection that we open; the server's name is `name`."""
        self.pair()
        return self._client

    def server(self) -> ssl.SSLContext:
        """The context for one connection that we accept."""
        self.pair()
        return self._server

    def listener(self, *, ask: bool = True) -> ssl.SSLContext:
        """The context for a listener, however long it lives. `ask`: clients have to show a certificate of this CA."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        if not ask:
            context.verify_mode = ssl.CERT_NONE
        return following(context, self.server)

    def grpc_server(self) -> grpc.ServerCredentials:
        return following_credentials(self.pair, self.authority)

    def grpc_client(self) -> grpc.ChannelCredentials:
        """The credentials for a channel that is made anew when `pair` is another one. It wants `grpc_options`."""
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
