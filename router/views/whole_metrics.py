"""The metrics of all routers that share an address, whichever of them is scraped: each line has the label `router`."""

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from router.siblings import Siblings

QUESTION: Final = "metrics"
MAX_BYTES: Final = 64 * 1024 * 1024  # of one router's text

_SAMPLE = re.compile(rb"(?m)^([A-Za-z_:][\w:]*)(\{?)")


class WholeMetrics:
    def __init__(self, router_id: str, own: Callable[[], bytes], siblings: Siblings) -> None:
        """`own`: this router's metrics, in Prometheus' text format."""
        self._router_id = router_id
        self._own = own
        self._siblings = siblings
        self._address = b""  # empty: it does not serve yet

    async def start(self, address: str) -> None:
        """`address`: HOST:PORT where the metrics are read."""
        self._address = address.encode()

        async def answer(address: bytes) -> bytes:
            return zlib.compress(self._labelled(), 1) if address == self._address else b""

        await self._siblings.answer(QUESTION, answer)

    async def exposition(self) -> bytes:
        others = await self._siblings.ask(QUESTION, self._address)
        return merged([self._labelled(), *(zlib.decompressobj().decompress(text, MAX_BYTES) for text in others)])

    def _labelled(self) -> bytes:
        return labelled(self._own(), "router", self._router_id)


def labelled(text: bytes, name: str, value: str) -> bytes:
    """Gives each line a label."""
    label = f'{name}="{value}"'.encode()
    return _SAMPLE.sub(lambda found: b"%b{%b%b" % (found[1], label, b"," if found[2] else b"}"), text)


def merged(texts: Iterable[bytes]) -> bytes:
    """One text, in which the lines of each metric stand together, as Prometheus wants them."""
    samples: defaultdict[bytes, list[bytes]] = defaultdict(list)
    head = b""
    for text in texts:
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# HELP"):
                head = line
            elif line.startswith(b"# TYPE"):
                head += line
            else:
                samples[head].append(line)
    return b"".join(head + b"".join(lines) for head, lines in samples.items())
