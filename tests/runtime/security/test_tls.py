"""The certificate files of serving.yaml: what is refused, by which name, and what a client is told."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from runtime.config.serving import SecurityConfig
from runtime.errors import ConfigError
from runtime.security.tls import load_tls


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    own, other = ca.issue_cert("baton.test"), ca.issue_cert("other.test")
    (folder / "cert").write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
    own.private_key_pem.write_to_path(folder / "key")
    other.private_key_pem.write_to_path(folder / "other")
    (folder / "text").write_text("no certificate")
    return {name: str(folder / name) for name in ("cert", "key", "other", "text", "nothing")}


def test_without_files_there_is_no_tls() -> None:
    assert load_tls(SecurityConfig()) is None


def test_a_certificate_tells_what_it_is_for(files: dict[str, str]) -> None:
    tls = load_tls(SecurityConfig(tls_cert_file=files["cert"], tls_key_file=files["key"]))
    assert tls is not None
    assert tls.name == "baton.test"
    assert tls.certificate == Path(files["cert"]).read_bytes()


@pytest.mark.parametrize(
    ("cert", "key", "field", "problem"),
    [
        ("cert", None, "tls_key_file", "is needed too"),
        (None, "key", "tls_cert_file", "is needed too"),
        ("nothing", "key", "tls_cert_file", "No such file"),
        ("cert", "nothing", "tls_key_file", "No such file"),
        ("text", "key", "tls_cert_file", "no certificate in PEM form"),
        ("key", "key", "tls_cert_file", "no certificate in PEM form"),
        ("cert", "text", "tls_key_file", "no key in PEM form"),
        ("cert", "other", "tls_key_file", "not that of the certificate"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    files: dict[str, str], cert: str | None, key: str | None, field: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tls(SecurityConfig(tls_cert_file=cert and files[cert], tls_key_file=key and files[key]))
    assert caught.value.where == f"security.{field}"
    assert problem in caught.value.problem


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path) -> None:
    expired = trustme.CA().issue_cert("baton.test", not_after=datetime.now(UTC) - timedelta(days=1))
    (tmp_path / "cert").write_bytes(b"".join(pem.bytes() for pem in expired.cert_chain_pems))
    expired.private_key_pem.write_to_path(tmp_path / "key")
    with pytest.raises(ConfigError, match=r"security\.tls_cert_file: .*expired"):
        load_tls(SecurityConfig(tls_cert_file=str(tmp_path / "cert"), tls_key_file=str(tmp_path / "key")))
