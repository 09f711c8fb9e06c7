"""What `baton status` shows of a fleet; the command itself is asked of a running service in test_running_service.py."""

import pytest

from baton.cli.status import _show
from baton.client.service_status import Status
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import plain


def status(*engines: str) -> Status:
    workers = [
        pb.WorkerStatus(worker_id=f"decode-{number}", role="decode", engine=engine)
        for number, engine in enumerate(engines, 1)
    ]
    return plain(Status, pb.StatusResponse(router_id="router-1", workers=workers, routers=["router-1"]))


@pytest.mark.parametrize(("engines", "shown"), [(("vllm", "vllm"), False), (("baton", "vllm", "external"), True)])
def test_workers_have_a_column_for_their_engine_where_they_have_several(
    engines: tuple[str, ...], shown: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    _show(status(*engines))
    text = capsys.readouterr().out
    assert ("engine" in text) == shown
    for engine in set(engines):
        assert (engine in text) == shown
