import pytest

from baton.service.many_workers import parse_arguments


def test_workers_are_named() -> None:
    assert parse_arguments(["--config", "f", "prefill-7", "decode-x"]).worker_ids == ["prefill-7", "decode-x"]


@pytest.mark.parametrize("wrong", [[], ["router-1"], ["decode-1", "decode-1"], ["decode.1"]])
def test_workers_that_cannot_be_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--config", "f", *wrong])
    assert "error" in capsys.readouterr().err
