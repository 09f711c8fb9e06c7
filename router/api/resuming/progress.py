"""How far a stream has come. `Progress` gives events their bookmarks and leaves out what a client already has.

Where an answer is cut into pieces is chance, and the events of a piece depend on it. What follows the end of a piece
does not. Therefore a bookmark tells where a piece ends, how long it is, and how many of its events were sent: made
again with a piece of these bounds, the answer has the same events up to there.
"""

from collections.abc import Callable, Sequence
from typing import NoReturn

from baton_proto.routers.left import NOTHING_READ, read_on
from router.api.resuming.bookmark import MAX_CHOICES, Bookmark, Origin, Told, told_text
from router.parsing.events import joined
from router.requests.request import Parsed, Piece
from runtime.errors import InvalidRequestError

DIFFERS = "cannot be gone on from: made again, the answer has other tokens than those sent; send the request without it"

GoOn = Callable[[int], None]
"""Called before the last piece of which the client has an event, with the number of events before that piece, in
streams of one choice."""


class Progress:
    """Call `take` for each piece, and then `next_bookmark` for each of its events: None if the client has the event,
    empty if the stream has no bookmarks."""

    def __init__(
        self, origin: Origin, last: Bookmark | None = None, go_on: GoOn | None = None, marks: bool = True
    ) -> None:
        """`last`: of the events that the client has. `marks`: the stream has bookmarks."""
        self._marks = marks and origin.num_choices <= MAX_CHOICES
        self._origin = str(origin) if self._marks else ""
        told = [Told()] * origin.num_choices if last is None else last.told
        self._choices = [_Choice(one) for one in told]
        self._told = [str(one) for one in told]
        self._index = 0  # of the choice that the last piece belongs to
        self._skips = False  # the client has all of that piece
        self._number = self._ending = self._ending_told = 0
        self._field = ""
        self._go_on = go_on
        if last is not None:
            self._field, self._number, self._ending_told = last.field, last.number, last.ending

    def take(self, piece: Piece) -> Piece | None:
        """Returns the piece to send now; None: it is sent with the next one. Raises InvalidRequestError when the
        client has other tokens."""
        if not self._marks:
            return piece
        self._index = piece.index
        choice = self._choices[piece.index]
        choice.begin, choice.events, choice.skipped = choice.tokens, 0, 0
        choice.tokens += len(piece.token_ids)
        choice.check = read_on(choice.check, piece.token_ids)
        choice.ended, choice.weights = piece.finish_reason is not None, piece.weights
        self._skips = False
        return piece if choice.behind is None else self._catch_up(piece, choice, choice.behind)

    def next_bookmark(self) -> str | None:
        if not self._marks:
            return ""
        if self._skips:
            return None
        choice = self._choices[self._index]
        choice.events += 1
        if choice.events <= choice.skipped:
            return None
        self._number += 1
        piece = choice.tokens - choice.begin
        self._told[self._index] = told_text(
            choice.tokens, piece, choice.events, choice.check, choice.ended, choice.weights
        )
        return self.last_bookmark()

    def next_of_ending(self) -> str | None:
        """The bookmark of the next event behind all pieces."""
        self._ending += 1
        if self._ending <= self._ending_told:
            return None
        self._number += 1
        return self.last_bookmark()

    def last_bookmark(self) -> str:
        if not self._marks:
            return ""
        told = self._told[0] if len(self._told) == 1 else ",".join(self._told)
        ending = f"+{self._ending}" if self._ending else ""
        return f"{self._origin}{self._number}:{told}{ending}"

    def _catch_up(self, piece: Piece, choice: "_Choice", behind: Told) -> Piece | None:
        if choice.tokens > behind.tokens or (choice.tokens == behind.tokens and choice.check != behind.check):
            self._differs()
        if not choice.ended and choice.tokens <= behind.tokens - behind.piece:
            self._skips = True
            return piece
        choice.held.append(piece)
        if not choice.ended and (behind.ended or choice.tokens < behind.tokens):
            return None
        if choice.ended != behind.ended or choice.tokens < behind.tokens:
            self._differs()
        choice.begin, choice.skipped, choice.behind = behind.tokens - behind.piece, behind.events, None
        if self._go_on is not None:
            self._go_on(self._number - behind.events)
        whole, choice.held = merged(choice.held), []
        return whole

    def _differs(self) -> NoReturn:
        raise InvalidRequestError(self._field, DIFFERS)


class _Choice:
    __slots__ = ("begin", "behind", "check", "ended", "events", "held", "skipped", "tokens", "weights")

    def __init__(self, behind: Told) -> None:
        self.behind = behind if behind.events else None  # what the client has; None: the answer is as far
        self.tokens = 0  # of all pieces that were taken
        self.begin = 0  # of those before the piece
        self.check = NOTHING_READ  # of `tokens`
        self.events = 0  # of the piece
        self.skipped = 0  # events of the piece that the client has
        self.ended = False
        self.weights = behind.weights
        self.held: list[Piece] = []


def merged(pieces: Sequence[Piece]) -> Piece:
    """Pieces of a choice that follow each other as one."""
    if len(pieces) == 1:
        return pieces[0]
    parsed = [piece.parsed for piece in pieces if piece.parsed is not None]
    thought = sum(one.reasoning_tokens for one in parsed)
    last = pieces[-1]
    return Piece(
        last.index,
        [token_id for piece in pieces for token_id in piece.token_ids],
        "".join(piece.text for piece in pieces),
        last.finish_reason,
        [logprobs for piece in pieces for logprobs in piece.logprobs],
        Parsed(joined([event for one in parsed for event in one.events]), thought) if parsed else None,
        last.stop_reason,
        pieces[0].prompt_logprobs,
        last.weights,
    )
