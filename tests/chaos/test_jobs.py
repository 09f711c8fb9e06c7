"""Games at the same time: their records add up, and their run ends by itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.judging.tally import Tally, summed, table
from tests.chaos.judging.verdict import Verdict

ROOT = Path(__file__).parents[2]


def tally(rounds: int, requests: int, failures: list[str]) -> Tally:
    known = Tally(requests=requests, failures=failures)
    known.rounds_of["mock"] = rounds
    known.verdicts[Verdict.EXACT] = requests
    known.leaked["blocks"] = rounds
    return known


def test_records_of_games_add_up_and_the_table_is_of_all() -> None:
    one, other = tally(3, 10, ["a"]).results(), tally(4, 20, []).results()
    one["most threads more in one life"], other["most threads more in one life"] = 5, 2
    one["MiB more per 100 rounds, of each life"] = {"router": [1.0]}
    other["MiB more per 100 rounds, of each life"] = {"router": [2.0], "decode": [0.0]}
    total = summed([one, other])
    assert (total["rounds"], total["requests"], total["failures"]) == (7, 30, ["a"])
    assert total["verdicts"]["exact"] == 30
    assert total["leaked"] == {"blocks": 7, "leases": 0, "files": 0}
    assert total["most threads more in one life"] == 5
    rows = dict(table(total))
    assert rows["MiB of memory more per 100 rounds, router"] == "1.50 (mean of 2 lives)"
    assert rows["failures"] == "1"


@pytest.mark.slow
def test_a_run_ends_at_its_limit_with_a_record_and_leaves_no_process(folder: Path) -> None:
    """The limit comes while services start."""
    command = [sys.executable, "-m", "tests.chaos", "--jobs", "2", "--scenario", "mock", "--scenario", "decode-only"]
    command += ["--minutes", "5", "--limit-minutes", "0.1", "--folder", str(folder), "--json", str(folder / "all")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((folder / "all").read_text())
    assert record["results"]["failures"] == []
    assert record["settings"]["jobs"] == 2
    assert all((folder / f"seed-{seed}" / "record.json").exists() for seed in (1, 2))
