"""A worker under another interpreter, whose environment has an engine that ours has not: which of our packages it sees,
and by which names."""

from pathlib import Path

import msgspec

from baton_proto.rollout import Code
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError
from runtime.processes.own_code import own_code

PACKAGES = ("baton_proto", "decode_worker", "engine", "kvtransfer", "prefill_worker", "runtime", "worker")


def package_links(folder: Path, code: Code | None = None) -> Path:
    """A folder for PYTHONPATH with our packages alone, because what lies beside them is of another environment. `code`
    None: those that this process runs from."""
    code = code or own_code()
    links = folder / f"packages-{code.version}"
    links.mkdir(exist_ok=True)
    for name in PACKAGES:
        link = links / name
        if not link.exists():
            target = next(Path(path, name) for path in code.paths if Path(path, name).is_dir())
            link.symlink_to(target, target_is_directory=True)
    return links


def interpreter(config: ServingConfig, engine: str, needs: str) -> Path:
    """`needs`: what the environment of workers with this engine must have. Raises ConfigError."""
    if config.workers.python is None:
        made = f".venv-{engine}/bin/python after make {engine}-env"
        raise ConfigError("workers.python", f"names the interpreter of the environment that has {needs}: {made}")
    path = Path(config.workers.python).expanduser().absolute()
    if not path.is_file():
        problem = f"{path} is no file: `make {engine}-env` makes an environment with {needs}"
        raise ConfigError("workers.python", problem)
    return path


def with_model_folder(config: ServingConfig) -> ServingConfig:
    """The model as a folder that every environment can read, under the name that it had. Raises what served_model()
    raises."""
    files = served_model(config)
    name = config.served_model_name or files.name
    return msgspec.structs.replace(config, model=str(files.folder), served_model_name=name)
