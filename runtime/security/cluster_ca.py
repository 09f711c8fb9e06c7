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

NAME: Final = "baton.internal"  # the one that every process goes by; the CA tells clusters apart
LIFETIME: Final = timedelta(days=1)  # before and after the issue, because the clocks of two machines differ
_CURVE_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_CA_TIMES: Final = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
_USAGES: Final = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)

PrivateKey = ec.EllipticCurvePrivateKey
_Extension = tuple[x509.ExtensionType, bool]  # and whether who does not know it has to refuse


class ClusterCa:
    """`seed`: 32 secret bytes. Because signatures are random, the certificates of two processes' CAs differ in a few
    bytes; name and key, which are what counts, are the same."""

    def __init__(self, seed: bytes) -> None:
        number = int.from_bytes(seed, "big") % (_CURVE_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        point = self._key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
        self._name = _named(f"Baton cluster {hashlib.sha256(point).hexdigest()[:12]}")
        self.certificate = self._signed(self._name, self._key.public_key(), _CA_TIMES, _kind(is_ca=True))

    def issue(self, key: PrivateKey, now: datetime) -> bytes:
        """A certificate in PEM form, for servers and for clients."""
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        extensions = [
            *_kind(is_ca=False),
            (purposes, False),
            (x509.SubjectAlternativeName([x509.DNSName(NAME)]), False),
        ]
        return self._signed(_named(NAME), key.public_key(), (now - LIFETIME, now + LIFETIME), extensions)

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        times: tuple[datetime, datetime],
        extensions: list[_Extension],
    ) -> bytes:
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number(), *times)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(own, False)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def new_private_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def pem_of(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _kind(is_ca: bool) -> list[_Extension]:
    usages = dict.fromkeys(_USAGES, False) | {"key_cert_sign" if is_ca else "digital_signature": True}
    return [(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), True), (x509.KeyUsage(**usages), True)]
