"""What a surviving mutant changed, and which survivors are known to change nothing that a caller can see."""

import contextlib
import io
import tokenize
from typing import Final

_SUM = "self.foreign = Totals(*map(sum, zip(NOTHING, *self.by_router.values(), strict=True)))"
_SAME_FIELDS = "all of them are Totals, of the same number of fields"
_FIRST_PERIOD = (
    "nothing can have been charged before the first period, and the bound of what is charged is the smaller one in it"
)
_AS_MANY = "with as many workers as there are, `Wanted.changed` to that many returns the same"
_SHRINKS_AGAIN = "if wanted.of(role) < have and since_s < now.config.down_cooldown_s:"
_SHRINKS = "if wanted.of(role) < have and grew_s < now.config.reversal_s:"
_GROWS = "if wanted.of(role) > have and shrank_s < now.config.reversal_s:"
_READY_ALIKE = "all ready workers have this constant in their key, and the part before it parts them from the others"
EQUIVALENT: Final[dict[str, dict[tuple[str, str], str]]] = {
    "planner/policy/guards.py": {
        (_SHRINKS_AGAIN, _SHRINKS_AGAIN.replace("< have", "<= have")): _AS_MANY,
        (_SHRINKS, _SHRINKS.replace("< have", "<= have")): _AS_MANY,
        (_GROWS, _GROWS.replace("> have", ">= have")): _AS_MANY,
    },
    "planner/policy/ladder.py": {
        (
            '-worker.since_s if worker.state == "starting" else 0.0,',
            '-worker.since_s if worker.state == "starting" else 1.0,',
        ): _READY_ALIKE,
    },
    "router/workers/account.py": {
        ("self._since = 0  # charged in this period", "self._since = 1  # charged in this period"): _FIRST_PERIOD,
        (
            "self._before = 0  # charged in the period before",
            "self._before = 1  # charged in the period before",
        ): _FIRST_PERIOD,
        (_SUM, _SUM.replace("strict=True", "strict=None")): _SAME_FIELDS,
        (_SUM, _SUM.replace("strict=True", "strict=False")): _SAME_FIELDS,
        (_SUM, _SUM.replace("strict=True", "")): _SAME_FIELDS,
    },
}
"""By module: (line, mutated line) -> why no test can tell them apart."""


def changed_lines(diff: str) -> tuple[str, str]:
    """The lines that a diff takes out and puts in, each as one line."""
    lines = diff.splitlines()
    before = [line[1:].strip() for line in lines if line.startswith("-") and not line.startswith("---")]
    after = [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    return " ".join(before), " ".join(after)


def only_words(before: str, after: str) -> bool:
    """Whether two lines differ in nothing but what strings say."""
    old, new = _tokens(before), _tokens(after)
    if len(old) != len(new):
        return False
    differing = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    return all(a[0] == b[0] == tokenize.STRING for a, b in differing)


def _tokens(line: str) -> list[tuple[int, str]]:
    """Type and text of each token; where it stands does not matter."""
    tokens: list[tuple[int, str]] = []
    with contextlib.suppress(tokenize.TokenError):  # a line that goes on in the next one
        tokens.extend((token.type, token.string) for token in tokenize.generate_tokens(io.StringIO(line).readline))
    return tokens
