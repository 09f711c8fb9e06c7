"""Which installations of Baton a service takes."""

import sys
from pathlib import Path

import pytest

from baton_proto.rollout import Code
from runtime.errors import ConfigError
from runtime.processes.own_code import check_code, own_code


def test_an_installation_that_others_may_write_or_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert own_code() == own_code()
    code = Code("2", sys.executable, (str(tmp_path),))
    check_code(code)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"code: .*: others may have written it"):
        check_code(code)
    with pytest.raises(ConfigError, match=r"code: /nowhere: No such file or directory: install it here"):
        check_code(Code("2", "/nowhere"))
