"""What a mutant changed."""

import contextlib
import io
import tokenize


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
