"""A worker under another interpreter, whose environment has an engine that ours has not: which of our packages it sees,
and by which names."""

from importlib.util import find_spec
from pathlib import Path

import msgspec

from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError

PACKAGES = ("baton_proto", "decode_worker", "engine", "kvtransfer", "prefill_worker", "runtime", "worker")


def package_links(folder: Path) -> Path:
    """A folder for PYTHONPATH with our packages alone, because what lies beside them is of another environment."""
    links = folder / "packages"
    links.mkdir(exist_ok=True)
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None, f"{name} is ours"
        assert spec.submodule_search_locations, f"{name} is a package"
        link = links / name
        if not link.exists():
            link.symlink_to(Path(spec.submodule_search_locations[0]).absolute(), target_is_directory=True)
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
