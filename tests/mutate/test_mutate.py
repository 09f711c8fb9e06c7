"""What is counted as a mutant, and which modules are judged."""

from pathlib import Path

import pytest

from tests.mutate.diffs import changed_lines, only_words
from tests.mutate.modules import PURE, judges_of
from tests.mutate.undecorated import undecorated


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


def test_a_function_loses_the_decorators_that_would_hide_it_and_keeps_its_lines() -> None:
    source = "@inlined\ndef f():\n    pass\n@compiled(\n    1,\n)\n@lru_cache(maxsize=4)  # small\ndef g():\n    pass\n"
    assert undecorated(source) == "\ndef f():\n    pass\n\n\n\n\ndef g():\n    pass\n"
    kept = "@contextmanager\ndef f():\n    pass\n@inlined\nclass A:\n    @property\n    def g(self): ...\n"
    assert undecorated(kept) == kept
