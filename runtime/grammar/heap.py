"""How many bytes native code holds, as the C library counts them: what llguidance has allocated is among them."""

import ctypes
import functools
from collections.abc import Callable


class _Mallinfo2(ctypes.Structure):
    """Of glibc, since 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def heap_bytes() -> int:
    """Bytes in use, of all threads together; 0 where the C library does not tell."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return 0
    told = mallinfo2()
    return int(told.uordblks) + int(told.hblkhd)  # small pieces; large ones, which are mapped


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function
