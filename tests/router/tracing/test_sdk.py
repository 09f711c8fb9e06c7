"""Which calls are sampled."""

import sys
import time
from collections.abc import Mapping

import pytest
from structlog.testing import capture_logs

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pip install 'baton-serve[otel]'")

from router.tracing.sdk import ENDPOINTS, RATIO, Sdk, wants_traces

YES = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
NO = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
UNREADABLE = {"traceparent": "00-0-0-01"}


def num_sampled(sdk: Sdk, carrier: Mapping[str, str], calls: int = 1000) -> int:
    return sum(sdk.start("POST", carrier, {}, time.time_ns()) is not None for _ in range(calls))


def sdk_with(monkeypatch: pytest.MonkeyPatch, share: str | None) -> Sdk:
    if share is not None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", RATIO)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    return Sdk("router-1")


@pytest.mark.parametrize("carrier", [{}, UNREADABLE])
def test_without_a_parent_the_share_is_sampled(monkeypatch: pytest.MonkeyPatch, carrier: Mapping[str, str]) -> None:
    sdk = sdk_with(monkeypatch, "0.25")
    try:
        assert 170 <= num_sampled(sdk, carrier) <= 330  # six standard deviations
    finally:
        sdk.shutdown()


@pytest.mark.parametrize("share", ["0", "1", "no number", None])
def test_with_a_parent_its_caller_decides(monkeypatch: pytest.MonkeyPatch, share: str | None) -> None:
    sdk = sdk_with(monkeypatch, share)
    try:
        assert (num_sampled(sdk, YES, 10), num_sampled(sdk, NO, 10)) == (10, 0)
    finally:
        sdk.shutdown()


@pytest.mark.parametrize("name", ENDPOINTS)
def test_a_collector_that_the_environment_names_gets_traces_unless_it_says_otherwise(name: str) -> None:
    named = {name: "http://127.0.0.1:4318"}
    assert not wants_traces({})
    assert wants_traces(named)
    assert not wants_traces(named | {"OTEL_SDK_DISABLED": "TRUE"})
    assert not wants_traces(named | {"OTEL_TRACES_EXPORTER": "none"})


@pytest.mark.parametrize("module", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_without_what_traces_need_there_are_none_and_a_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with capture_logs() as logs:
        assert not wants_traces({ENDPOINTS[0]: "http://127.0.0.1:4318"})
    assert [line["way_out"] for line in logs] == ["pip install 'baton-serve[otel]'"]
