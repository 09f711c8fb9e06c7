from pathlib import Path

import pytest

from kvtransfer.wire.sockets import MAX_UNIX_PATH_BYTES, listen_unix
from runtime.errors import ConfigError


def test_a_unix_path_that_is_too_long_names_the_folder_to_change(tmp_path: Path) -> None:
    fits = tmp_path / ("x" * (MAX_UNIX_PATH_BYTES - len(str(tmp_path)) - 1))
    listen_unix(str(fits)).close()
    with pytest.raises(ConfigError, match=r"TMPDIR: .* is longer than the 107 bytes .* name a shorter folder"):
        listen_unix(f"{fits}x")
