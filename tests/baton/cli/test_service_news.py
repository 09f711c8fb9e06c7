import sys

import pytest

from baton.cli.terminal.service_news import print_news


def test_a_loss_that_cannot_be_logged_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it fails as writing does
    monkeypatch.setattr(sys, "stderr", full)
    print_news(True, "error: decode-1 has ended", event="lost", id="decode-1")
    assert capsys.readouterr().out == '{"event": "lost", "id": "decode-1"}\n'
    with pytest.raises(OSError, match="No space left"):
        full.close()
