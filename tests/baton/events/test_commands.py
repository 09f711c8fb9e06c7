"""`baton events` as a program, on a real NATS server."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from baton.events.recording import Batch, Recording, RecordingWriter
from baton.service.local.nats_server import NatsServer
from runtime.nats.client import NatsClient
from tests.baton.events.cluster import Cleared, Workers, baton, removed, running, stored

pytestmark = pytest.mark.slow

NOBODY = "nats://127.0.0.1:1"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["events", *arguments])


async def output(process: asyncio.subprocess.Process) -> tuple[str, str]:
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate()
    return stdout.decode(), stderr.decode()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return (await process.stdout.readline()).decode()


async def told(process: asyncio.subprocess.Process, words: str) -> None:
    """Returns when stderr says so."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while words not in (text := (await process.stderr.readline()).decode()):
            assert text, f"{words!r} was never said"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tail", "--type", "eaten"], "eaten"),
        (["tail", "--since", "soon"], "90s, 5m or 1h"),
        (["tail", "--since", "5m", "--from-start"], "exclude each other"),
        (["tail", "--worker", "a.b"], "one word"),
        (["tail", "--namespace", "a b"], "one word"),
        (["lag", "--watch", "0"], "--watch"),
        (["replay", "x", "--speed", "2", "--max"], "exclude each other"),
        (["replay", "/nowhere"], "No such file"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert words in result.stderr


@pytest.mark.parametrize("command", [["tail"], ["lag"], ["record", "x"], ["replay", "x"]])
def test_no_nats_at_the_url_ends_with_3_in_time(command: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if command[0] == "replay":
        with RecordingWriter(tmp_path / "x", "default"):
            pass
    result = run(*command, "--nats-url", NOBODY, "--timeout", "0.3")
    assert result.exit_code == ExitCode.UNAVAILABLE
    assert result.stderr == (
        f"error: NATS at {NOBODY} does not answer: `baton up` starts a service here, which commands find by "
        "themselves; --nats-url names one elsewhere\n"
    )
    assert command[0] == "replay" or not (tmp_path / "x").exists()


async def test_tail_shows_a_line_per_event(nats_server: NatsServer, workers: Workers) -> None:
    await workers.publish("w0", [stored([1, 2]), stored([1, 2, 3], known=2)], [removed([1, 2, 3], kept=2)])
    await workers.publish("w1", [Cleared()])
    stdout, stderr = await output(await baton(nats_server, "tail", "--from-start", "--for", "1s", "--rates", "0.2"))
    assert stderr == ""
    lines = [line.split() for line in stdout.splitlines() if not line.startswith("--")]
    assert [words[1:6] for words in lines] == [
        ["w0", "#1", "stored", "2", "blocks"],
        ["w0", "#1", "stored", "1", "block"],
        ["w0", "#2", "removed", "1", "block"],
        ["w1", "#1", "cleared"],
    ]
    assert "at the start" in stdout.splitlines()[0]
    assert f"after {int.from_bytes(stored([1, 2]).sequence_hashes[8:], 'little'):016x}"[:14] in stdout.splitlines()[1]
    (summary,) = [line for line in stdout.splitlines() if line.startswith("--")]
    assert "events/s" in summary
    assert summary.endswith("2 workers")


async def test_tail_follows_until_a_signal_and_ends_with_0(nats_server: NatsServer, workers: Workers) -> None:
    await workers.publish("w0", [stored([1])])
    process = await baton(nats_server, "tail", "--from-start", "--json", "--worker", "w0", "--type", "stored")
    assert json.loads(await line(process))["id"] == 1
    await workers.publish("w1", [stored([2])])
    source = await workers.publish("w0", [Cleared()], [stored([7, 8], known=1)])
    event = stored([7, 8], known=1)
    seen = json.loads(await line(process))
    assert seen.pop("time_s") > 1.6e9
    assert seen == {
        "worker": "w0",
        "incarnation": source.incarnation,
        "id": 3,
        "type": "stored",
        "blocks": 1,
        "parent": f"{event.parent:016x}",
        "first": f"{int.from_bytes(event.sequence_hashes, 'little'):016x}",
        "home": "device",
    }
    process.send_signal(signal.SIGINT)
    assert await output(process) == ("", "")
    assert process.returncode == ExitCode.OK


async def test_tail_ends_with_3_when_nats_goes_away(nats_server: NatsServer, workers: Workers) -> None:
    await workers.publish("w", [Cleared()])
    process = await baton(nats_server, "tail", "--from-start", "--timeout", "2")
    await line(process)
    await nats_server.kill()
    _, stderr = await output(process)
    assert process.returncode == ExitCode.UNAVAILABLE
    assert stderr.splitlines()[-1] == "error: NATS has not answered for 2 s"
    assert "Traceback" not in stderr


async def test_lag_shows_every_worker(nats_server: NatsServer, workers: Workers) -> None:
    await workers.publish("w0", [Cleared()], [Cleared()])
    await workers.publish("w1", [Cleared()])
    stdout, _ = await output(await baton(nats_server, "lag"))
    for words in ("2 workers", "w0", "w1", "none", "s ago"):
        assert words in stdout
    stdout, _ = await output(await baton(nats_server, "lag", "--json"))
    fields = {worker["worker"]: worker for worker in json.loads(stdout)["workers"]}
    assert (fields["w0"]["published_id"], fields["w0"]["stored_id"], fields["w0"]["behind"]) == (2, 2, 0)
    assert fields["w1"]["missing"] == []


async def test_lag_watches_until_a_signal(nats_server: NatsServer, workers: Workers) -> None:
    await workers.publish("w", [Cleared()])
    process = await baton(nats_server, "lag", "--json", "--watch", "0.1")
    assert json.loads(await line(process))["workers"][0]["stored_id"] == 1
    await workers.publish("w", [Cleared()])
    async with asyncio.timeout(60):
        while json.loads(await line(process))["workers"][0]["stored_id"] != 2:
            pass
    process.send_signal(signal.SIGTERM)
    await output(process)
    assert process.returncode == ExitCode.OK


async def test_record_and_replay_bring_the_tree_back(
    nats_server: NatsServer, nats: NatsClient, workers: Workers, tmp_path: Path
) -> None:
    await workers.publish("w0", [stored([1, 2, 3])])
    file = str(tmp_path / "events")
    recording = await baton(nats_server, "record", file)
    await told(recording, "recording into")
    await workers.publish("w0", [stored([1, 2, 3, 4], known=3)])
    await workers.publish("w1", [stored([5])])
    recording.send_signal(signal.SIGINT)
    stdout, _ = await output(recording)
    assert recording.returncode == ExitCode.OK
    assert "2 events in 2 batches of 2 workers" in stdout

    refused = await baton(nats_server, "replay", file, "--max")
    _, stderr = await output(refused)
    assert refused.returncode == ExitCode.USAGE
    assert "give the replayed ones other names" in stderr
    replaying = await baton(nats_server, "replay", file, "--max", "--hold", "--prefix", "old-")
    assert "2 events in 2 batches replayed" in await line(replaying)
    async with running(nats) as router:
        await router.until_table(
            {
                "w0": {stored([1, 2, 3, 4])},
                "w1": {stored([5])},
                "old-w0": {stored([1, 2, 3, 4])},
                "old-w1": {stored([5])},
            }
        )
        replaying.send_signal(signal.SIGINT)
        await output(replaying)
        assert replaying.returncode == ExitCode.OK
        await router.until(lambda: set(router.directory.workers) == {"w0", "w1"})


async def test_a_recording_that_is_killed_is_readable(
    nats_server: NatsServer, workers: Workers, tmp_path: Path
) -> None:
    recording = await baton(nats_server, "record", str(tmp_path / "events"))
    await told(recording, "recording into")
    await workers.publish("w", [stored([1])])
    async with asyncio.timeout(60):
        while not any(isinstance(frame, Batch) for frame in Recording(tmp_path / "events").frames()):
            await asyncio.sleep(0.02)
    recording.kill()
    await output(recording)
    replayed = await baton(nats_server, "replay", str(tmp_path / "events"), "--max", "--prefix", "x-")
    stdout, stderr = await output(replayed)
    assert "1 event in 1 batch replayed" in stdout
    assert "not ended in order" in stderr
    assert replayed.returncode == ExitCode.OK
