"""The journal, and other policies run over it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton_proto.planner import MAJOR
from planner.journal import Decided, EffectEnded, Journal, Line, Started, read_journal
from planner.planner import Planner
from runtime.config.planner import PlannerConfig
from runtime.errors import ConfigError
from tests.planner.observations import observation, sampled, workers

runner = CliRunner()
DECISIONS = 30


def recorded(policy: str = "slo") -> list[Line]:
    """A queue that grows: `threshold` wants a worker more, `slo` sees no request."""
    config = PlannerConfig(policy=policy)
    planner = Planner(config)
    lines: list[Line] = [Started(0.0, MAJOR, policy)]
    for number in range(DECISIONS):
        seen = observation(5.0 * number, workers(2, 2), sampled([8.0, 9.0], 0.7, 2, 2))
        lines.append(Decided(seen.time_s, seen, planner.decide(seen), 1.0))
    lines.append(EffectEnded(99.0, "add", "prefill-3", "prefill", 10.0, 60.0))
    return lines


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "plan.jsonl"
    writer = Journal(path, 10**9)
    for line in recorded():
        writer.write(line)
    writer.close()
    return path


def test_what_is_written_is_what_is_read(journal: Path) -> None:
    assert list(read_journal(journal)) == recorded()


def test_a_last_line_that_was_cut_off_is_left_out(journal: Path) -> None:
    data = journal.read_bytes()
    journal.write_bytes(data[:-10])
    assert list(read_journal(journal)) == recorded()[:-1]


def test_a_line_that_is_none_is_named(journal: Path) -> None:
    journal.write_bytes(b'{"type":"other"}\n')
    with pytest.raises(ConfigError, match=r"plan\.jsonl:1: is no line"):
        list(read_journal(journal))


def test_a_journal_of_another_version_is_refused(journal: Path) -> None:
    journal.write_bytes(journal.read_bytes().replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(ConfigError, match="major version 2"):
        list(read_journal(journal))


def test_a_journal_that_has_grown_large_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "plan.jsonl"
    writer = Journal(path, 2000)
    for line in recorded():
        writer.write(line)
    writer.close()
    old = tmp_path / "plan.jsonl.1"
    assert 2000 <= old.stat().st_size < 6000
    assert list(read_journal(old))


def test_a_journal_is_not_written_through_a_link_that_lies_there(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "journal").symlink_to("victim")
    with pytest.raises(ConfigError, match="is a symbolic link: name what it leads to"):
        Journal(tmp_path / "journal", max_bytes=1)


def test_replaying_the_same_policy_gives_the_same_decisions(journal: Path) -> None:
    result = runner.invoke(app, ["plan", "replay", str(journal)])
    assert result.exit_code == 0, result.output
    assert "both want the same all the time" in result.output


def test_replaying_another_policy_shows_where_it_differs(journal: Path) -> None:
    result = runner.invoke(app, ["plan", "replay", str(journal), "--policy", "threshold"])
    assert result.exit_code == 0, result.output
    assert "threshold" in result.output
    assert "one prefill worker more" in " ".join(result.output.split())


def test_the_difference_for_programs(journal: Path) -> None:
    result = runner.invoke(app, ["plan", "replay", str(journal), "--policy", "threshold", "--json"])
    document = json.loads(result.output)
    assert document["recorded"]["policy"] == "slo"
    assert document["other"]["most_prefill"] == 3
    assert len(document["differing"]) == DECISIONS
    assert document["effects"] == 1


def test_an_empty_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.touch()
    result = runner.invoke(app, ["plan", "replay", str(path)])
    assert result.exit_code == 2
    assert "holds no decision" in result.output


def test_a_plot_without_matplotlib_says_what_to_install(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = runner.invoke(app, ["plan", "replay", str(journal), "--plot", str(journal.with_suffix(".png"))])
    assert result.exit_code == 2
    assert "pip install 'baton-serve[plot]'" in result.output


def test_a_plot_is_a_picture(journal: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    path = journal.with_suffix(".png")
    result = runner.invoke(app, ["plan", "replay", str(journal), "--policy", "threshold", "--plot", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
