"""How long a test searches: FUZZ_SECONDS is for all of `make fuzz`; without it, a little."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

SECONDS = float(os.environ.get("FUZZ_SECONDS", "15"))
EXAMPLES_PER_S = 20.0  # on two shared cores


def fuzzed(seconds: float = 1.0) -> Callable[[Any], Any]:
    """Settings of hypothesis for a test against a live process's end. `seconds`: its share of 15. The same examples
    each time, unless FUZZ_SECONDS asks for a longer search."""
    examples = max(5, int(SECONDS / 15 * seconds * EXAMPLES_PER_S))
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=SECONDS <= 60,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
