"""A clock that a test has in its hand."""

from dataclasses import dataclass


@dataclass
class Clock:
    """What time.monotonic() says to a test and its event loop: it stands still until the test moves it on."""

    now_s: float

    def __call__(self) -> float:
        return self.now_s
