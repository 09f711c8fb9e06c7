"""Who may call what operators call over HTTP, and what is written down of it."""

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from structlog.testing import capture_logs

from router.api.http import key_guard as guard_module
from router.api.operators.guard import OperatorsGuard
from runtime.security.callers import key_name
from runtime.security.failed_logins import FREE, FailedLogins
from runtime.security.secret import Secret

KEYS = [Secret("o" * 32), Secret("p" * 32)]


async def done(http: Request) -> Response:
    return Response()


def asking(key: str | None, method: str = "POST") -> Request:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope: dict[str, Any] = {"type": "http", "method": method, "path": "/sleep", "query_string": b"level=1"}
    return Request(scope | {"headers": headers, "client": ("10.0.0.1", 80), "scheme": "http", "server": ("a", 1)})


async def test_what_an_operator_does_is_logged_with_the_name_of_the_key() -> None:
    endpoint = OperatorsGuard(KEYS).guarded(done)
    with capture_logs() as lines:
        for key in KEYS:
            assert (await endpoint(asking(key.reveal()))).status_code == 200
        await endpoint(asking(KEYS[0].reveal(), "GET"))
    assert [(line["what"], line["query"], line["by"]) for line in lines] == [
        ("/sleep", "level=1", key_name(key)) for key in KEYS
    ]
    assert len({key_name(key) for key in KEYS}) == 2
    assert not any(key.reveal() in str(lines) for key in KEYS)


async def test_wrong_keys_are_counted_and_wait_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(guard_module.asyncio, "sleep", sleep)
    logins = FailedLogins()
    endpoint = OperatorsGuard(KEYS, logins).guarded(done)
    for key in (*["x" * 32] * (FREE + 1), None):
        assert (await endpoint(asking(key))).status_code == 401
    assert +logins.counts == {("http", "operator key"): FREE + 1}
    assert [wait > 0 for wait in waits] == [False] * FREE + [True]
