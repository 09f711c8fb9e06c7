"""What a process of this machine is started with."""

import sys
from pathlib import Path

from baton.service.children import Children
from baton.service.launches import Launches
from baton.service.local.build_process import build_process
from baton.service.local.child_process import ChildProcess
from runtime.config.serving import load_config, parse_config


def test_each_worker_of_a_mixed_service_has_its_own_configuration_and_interpreter(
    tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    workers = {"prefill": 0, "decode": {"baton": 1, "vllm": 1}, "python": str(other)}
    config = parse_config({"model": str(tiny_model), "workers": workers})
    commands = {}
    for launch in Launches(config, {}, Children()).missing():  # all are built before the first one reads its file
        process = build_process(launch, launch.config, tmp_path, None)
        assert isinstance(process, ChildProcess)
        commands[launch.name] = process.command
    read = {name: load_config(Path(command[command.index("--config") + 1])) for name, command in commands.items()}
    assert {name: one.workers.engine for name, one in read.items()} == {
        "router-1": "baton",
        "decode-1": "baton",
        "decode-2": "vllm",
    }
    assert {name: command[0] for name, command in commands.items()} == {
        "router-1": sys.executable,
        "decode-1": sys.executable,
        "decode-2": str(other),
    }
