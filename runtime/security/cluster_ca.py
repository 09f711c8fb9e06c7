"""The certificate authority (CA) of a cluster. Each process derives the same CA from the cluster key and issues its own
certificate, so that no file has to travel."""

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.security.contexts import Pair

NAME: Final = "baton.internal"  # the one that every process goes by; the CA tells clusters apart
LIFETIME: Final = timedelta(days=1)  # before and after the issue, because the clocks of two machines differ
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

    def issue(self, now: datetime) -> Pair:
        """This process's key with a certificate for servers and for clients."""
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        names = x509.SubjectAlternativeName([x509.DNSName(NAME)])
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
