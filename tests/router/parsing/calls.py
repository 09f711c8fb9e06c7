"""What code costs in calls, which do not depend on the machine."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Calls:
    """A profile function: `number` calls were made, of Python's functions and of C's."""

    number = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self.number += event in ("call", "c_call")


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Counts those of this thread. No garbage is collected meanwhile, because that calls what objects of other tests
    leave behind."""
    calls, before = Calls(), sys.getprofile()
    gc.disable()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        gc.enable()
