"""The tokens that images are in prompts. A server makes them, and tells them with an answer's first token: the next
turn of a chat is then known as the server has it, so the router finds the blocks of its prefix.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from baton_proto.images import Image, Seen, unplaced
from router.text.chat_template import SLOT, Message
from router.text.text_encoder import TokenIds
from runtime.errors import InvalidRequestError

MAX_KNOWN_TOKENS = 4 * 1024 * 1024  # of all images that are remembered: 16 MiB

Render = Callable[[Sequence[Message]], TokenIds]


class _Known(Struct, frozen=True):
    """`tokens` replace those of the mark, but for so many before and behind."""

    tokens: TokenIds
    before: int
    behind: int


class ImageTokens:
    """Event loop only."""

    def __init__(self, render: Render, added: Collection[int]) -> None:
        """`render`: a chat; `added`: the added tokens of the vocabulary, of which templates make an image's mark."""
        self._render = render
        self._added = added
        self._mark: TokenIds | None = None
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._num_tokens = 0

    def place(self, name: str, tokens: TokenIds, images: Sequence[Image]) -> tuple[TokenIds, list[Image]]:
        """The prompt with the tokens of those images that are known, and where all of them lie. `name`: the caller's
        name of the messages. Raises InvalidRequestError."""
        mark = self.mark(name)
        starts = _starts(tokens, mark)
        if len(starts) != len(images):
            problem = f"have {len(images)} images, and the model's chat template has places for {len(starts)}"
            raise InvalidRequestError(name, problem)
        parts, placed, end, offset = list[TokenIds](), list[Image](), 0, 0
        for start, image in zip(starts, images, strict=True):
            known = self._known.get(image.name) or _Known(mark, 0, 0)
            inner = mark[known.before : len(mark) - known.behind]
            text = tokens[end : start + known.before]
            offset += len(text)
            placed.append(replace(image, offset=offset, length=len(known.tokens), mark=inner.tolist()))
            parts += [text, known.tokens]
            offset += len(known.tokens)
            end = start + known.before + len(inner)
        return np.concatenate([*parts, tokens[end:]]), placed

    def learn(self, tokens: Sequence[int], images: Sequence[Image], seen: Seen) -> int:
        """`tokens`: the prompt as `place` gave it; `seen`: as a server has it. Returns its length there. Nothing is
        learned where server and template differ beside the images."""
        theirs, mark = np.frombuffer(seen.token_ids, dtype="<u4"), self.mark("messages")
        written = np.array(unplaced(tokens, images), dtype=np.uint32)
        texts = _between(written, [(start, len(mark)) for start in _starts(written, mark)])
        others = _between(theirs, seen.places)
        before, behind = len(others[0]) - len(texts[0]), len(others[-1]) - len(texts[-1])
        if min(before, behind) < 0 or before + behind >= len(mark) or len(texts) != len(others):
            return len(theirs)
        head, tail, last = mark[:before], mark[len(mark) - behind :], len(texts) - 1
        for i, (text, other) in enumerate(zip(texts, others, strict=True)):
            wanted = np.concatenate([tail[: i * behind], text, head[: (last - i) * before]])
            if not np.array_equal(wanted, other):
                return len(theirs)
        for image, (offset, length) in zip(images, seen.places, strict=True):
            self._keep(image.name, _Known(theirs[offset : offset + length].copy(), before, behind))
        return len(theirs)

    def _keep(self, name: str, known: _Known) -> None:
        if (former := self._known.pop(name, None)) is not None:
            self._num_tokens -= len(former.tokens)
        self._known[name] = known
        self._num_tokens += len(known.tokens)
        while self._num_tokens > MAX_KNOWN_TOKENS:
            self._num_tokens -= len(self._known.popitem(last=False)[1].tokens)

    def mark(self, name: str) -> TokenIds:
        """What the template writes for an image. Raises InvalidRequestError when it knows none."""
        if self._mark is None:
            self._mark = self._found_mark()
        if not len(self._mark):
            raise InvalidRequestError(name, "have images, and the model's chat template has no place for them")
        return self._mark

    def _found_mark(self) -> TokenIds:
        try:
            shown, plain = (self._render([{"role": "user", "content": text, "images": [1]}]) for text in (SLOT, ""))
        except InvalidRequestError:  # it reads texts alone
            return np.empty(0, dtype=np.uint32)
        ours = shown[_common(shown, plain) : len(shown) - _common(shown[::-1], plain[::-1])]
        at = [i for i, token in enumerate(ours.tolist()) if token in self._added]
        return ours[at[0] : at[-1] + 1] if at else ours[:0]


def _between(tokens: TokenIds, places: Sequence[tuple[int, int]]) -> list[TokenIds]:
    """What lies before, between and behind the places, which are (offset, length)."""
    ends = [0, *(offset + length for offset, length in places)]
    starts = [*(offset for offset, _ in places), len(tokens)]
    return [tokens[end:start] for end, start in zip(ends, starts, strict=True)]


def _starts(tokens: TokenIds, mark: TokenIds) -> list[int]:
    starts: list[int] = []
    for start in np.flatnonzero(tokens == mark[0]).tolist():
        is_free = not starts or start >= starts[-1] + len(mark)
        if is_free and np.array_equal(tokens[start : start + len(mark)], mark):
            starts.append(start)
    return starts


def _common(one: TokenIds, other: TokenIds) -> int:
    """How many leading tokens are equal."""
    shortest = min(len(one), len(other))
    differ = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(differ[0]) if len(differ) else shortest
