from pathlib import Path

import pytest

from worker.arguments import parse_arguments


def test_config_and_worker_id_are_read() -> None:
    arguments = parse_arguments("decode_worker", ["--config", "serving.yaml", "--worker-id", "decode-0"])
    assert (arguments.config, arguments.worker_id) == (Path("serving.yaml"), "decode-0")


@pytest.mark.parametrize("worker_id", ["", "a.b", "a b", "a*", ">", "é"])
def test_an_id_that_is_no_subject_token_is_refused(worker_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments("decode_worker", ["--config", "serving.yaml", "--worker-id", worker_id])
    assert "worker-id" in capsys.readouterr().err
