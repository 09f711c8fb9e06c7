"""Which versions of vLLM a worker runs with."""

import re

import structlog

from runtime.errors import ConfigError

OLDEST = (0, 26)
TESTED = ((0, 26), (0, 32))  # on a GPU, on CPUs

log = structlog.get_logger()


def check_version(version: str, where: str = "workers.python") -> None:
    """where: the key that names it. Raises ConfigError for a version that is too old; warns of an untested one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    tested = " and ".join(".".join(map(str, one)) for one in TESTED)
    if number < OLDEST:
        problem = f"has vLLM {version}; Baton's workers need 0.26 or newer (tested: {tested})"
        raise ConfigError(where, problem)
    if number not in TESTED:
        log.warning("this version of vLLM was not tested", version=version, tested=tested)
