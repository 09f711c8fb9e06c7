"""What is counted as a mutant, and which modules are judged."""

from pathlib import Path

import pytest

from tests.mutate.modules import PURE, judges_of
from tests.mutate.survivors import changed_lines, only_words


def test_a_mutant_that_changes_words_alone_is_told_from_others() -> None:
    assert only_words('reason = f"{budget} GPUs are left"', 'reason = f"XX{budget} GPUs are leftXX"')
    assert not only_words('reason = "no GPU"', "reason = None")
    assert not only_words("if wait_s > 0:", "if wait_s >= 0:")
    assert not only_words("wait(first,", "wait(None,")


def test_lines_of_a_diff_lose_their_marks() -> None:
    assert changed_lines("--- a\n+++ b\n@@ -1 +1 @@\n-    x = 1\n+    x = 2\n") == ("x = 1", "x = 2")


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_has_judges_of_its_own(module: str) -> None:
    assert Path(module).exists()
    assert judges_of(module)
