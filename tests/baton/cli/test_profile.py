"""`baton profile` on the mock engine, whose true step times are known."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from baton.cli.app import app
from baton.cli.profile import Profile
from baton.cli.terminal.exit_codes import ExitCode
from runtime.config.serving import ServingConfig, dump_config, load_config
from runtime.config.step_times import StepTimes

TRUE = StepTimes(11.0, 0.05, 4e-6, 8.0, 0.3, 2e-4)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "serving.yaml"
    path.write_text(dump_config(ServingConfig(model="mock", step_times=TRUE)))
    return path


def test_the_true_step_times_are_found_whatever_the_profile_was(config: Path) -> None:
    result = run("--config", str(config), "--json")
    assert result.exit_code == ExitCode.OK, result.output
    found = msgspec.json.decode(result.stdout, type=Profile)
    for name, value in msgspec.structs.asdict(TRUE).items():
        assert getattr(found.times, name) == pytest.approx(value, rel=0.02), name
    assert found.prefill.p90_error < 0.01
    assert found.decode.p90_error < 0.01
    assert found.prefill.steps > 30  # most prompts take one step
    assert found.decode.steps > 100


def test_what_it_writes_is_a_section_of_serving_yaml(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.yaml"
    result = run("--config", str(config), "--out", str(out))
    assert result.exit_code == ExitCode.OK, result.output
    assert "prefill_floor_ms" not in result.stdout
    assert load_config(out).step_times.decode_floor_ms == pytest.approx(TRUE.decode_floor_ms, rel=0.02)
    shown = run("--config", str(config))
    assert shown.stdout.endswith(out.read_text())
    assert "error, median" in shown.stdout


def test_too_little_time_is_said_to_be_too_little(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    path.write_text("model: mock\nstep_times: {prefill_floor_ms: 1000}")
    result = run("--config", str(path), "--seconds", "2")
    assert result.exit_code == ExitCode.USAGE
    assert "--seconds: in 2 s only" in result.stderr


def test_a_model_that_is_not_there_and_a_file_that_cannot_be_written_are_refused(config: Path, tmp_path: Path) -> None:
    assert run("--model", str(tmp_path / "none")).exit_code == ExitCode.USAGE
    result = run("--config", str(config), "--out", str(tmp_path / "no" / "profile.yaml"))
    assert result.exit_code == ExitCode.USAGE
    assert "profile.yaml: No such file" in result.stderr
