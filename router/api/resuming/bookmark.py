"""A bookmark is the id of an event in a stream. With the body of the request it is all that a router needs to make the
same answer again and to go on behind the event, so no router remembers anything. Workers remember answers that were
left (worker/requests/left_answers.py), so that few tokens are computed twice.

`REQUEST:ANSWER:NUMBER:TOLD`: the request's id; what else the answer is made of (`_ANSWER` in base64); the number of the
event; how much is told of each choice, and of the ending.
"""

import asyncio
import re
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct

from baton_proto.routers.left import NOTHING_READ, read_on
from baton_proto.sampling import SamplingParams
from router.api.wishes.sampling_options import Options, check_in_vocabulary
from router.api.wishes.validation import Call
from router.requests.draw import DICE_BYTES, Draw
from router.requests.request import GenerateRequest
from router.workers.left_answers import Recall
from runtime.errors import InvalidRequestError

MAX_CHOICES: Final = 16  # of a stream with bookmarks, because each of them tells of every choice

_ANSWER = struct.Struct(f"<I{DICE_BYTES}sIIB")  # fields of an Origin in their order
_COUNT = "[0-9]{1,10}"
_TOLD = rf"{_COUNT}\.{_COUNT}\.{_COUNT}\.[0-9a-f]{{1,8}}(\.[0-9a-f]{{1,8}})?!?"
_ID = re.compile(
    rf"(?P<request>[!-~]{{1,128}}):(?P<answer>[\w-]{{34}}):(?P<number>{_COUNT})"
    rf":(?P<told>{_TOLD}(,{_TOLD}){{0,{MAX_CHOICES - 1}}})(\+(?P<ending>[0-9]))?",
    re.ASCII,
)
NOT_OURS: Final = "is not the id of an event that this service sent; send the request without it"
OF_ANOTHER: Final = "is the id of an event of another request: a stream goes on only for the very same body"


def told_text(tokens: int, piece: int, events: int, check: int, ended: bool, weights: int) -> str:
    """The fields of a Told as a bookmark has them; a stream makes no Told for each event."""
    return f"{tokens}.{piece}.{events}.{check:x}.{weights:x}{'!' if ended else ''}"


class Told(Struct, frozen=True):
    """How much of a choice has been told."""

    tokens: int = 0  # up to the end of the last piece of which an event was sent
    piece: int = 0  # tokens of that piece
    events: int = 0  # of that piece, that were sent
    check: int = NOTHING_READ  # of `tokens`, see `read_on`
    ended: bool = False  # the piece is the last one
    weights: int = 0  # that computed the tokens, see weights_tag; 0: there are none

    def __str__(self) -> str:
        return told_text(self.tokens, self.piece, self.events, self.check, self.ended, self.weights)


class Origin(Struct, frozen=True):
    """What an answer is made of, beside the body that asks for it."""

    request_id: str  # that the caller sees
    draw: Draw
    max_tokens: int  # of the first prompt's choices
    body: int  # its checksum
    num_choices: int

    @classmethod
    def of(cls, request_id: str, draw: Draw, body: int, requests: Sequence[GenerateRequest]) -> "Origin":
        num_choices = sum(len(request.sampling) for request in requests)
        return cls(request_id, draw, requests[0].sampling[0].max_tokens, body, num_choices)

    def __str__(self) -> str:
        """The beginning of the stream's bookmarks."""
        dice, created_s = self.draw.dice, self.draw.created_s
        answer = _ANSWER.pack(created_s & 0xFFFFFFFF, dice, self.max_tokens, self.body, self.num_choices)
        return f"{self.request_id}:{urlsafe_b64encode(answer).decode().rstrip('=')}:"


class Bookmark(Struct, frozen=True):
    origin: Origin
    number: int  # of the event, from 1 on
    told: Sequence[Told]  # of each choice
    ending: int  # events behind the choices
    field: str  # where the caller gives it

    @classmethod
    def read(cls, text: str, field: str) -> "Bookmark":
        """Raises InvalidRequestError."""
        found = _ID.fullmatch(text)
        if found is None:
            raise InvalidRequestError(field, NOT_OURS)
        created_s, dice, max_tokens, body, num_choices = _ANSWER.unpack(urlsafe_b64decode(found["answer"] + "=="))
        told = [_told(one) for one in found["told"].split(",")]
        ending, has_ended = int(found["ending"] or 0), all(one.ended for one in told)
        if len(told) != num_choices or (ending and not has_ended) or any(one.tokens and not one.events for one in told):
            raise InvalidRequestError(field, NOT_OURS)
        origin = Origin(found["request"], Draw(created_s, dice), max_tokens, body, num_choices)
        return cls(origin, int(found["number"]), told, ending, field)

    def asked_again(self, call: Call, options: Options, checksum: int) -> tuple[Call, Options]:
        """Call and options as they were for the first router: with its draw, and where the caller gives no limit, with
        the one that the answer had. Raises InvalidRequestError."""
        if checksum != self.origin.body:
            raise InvalidRequestError(self.field, OF_ANOTHER)
        given = {"max_tokens": self.origin.max_tokens, **options.given}
        again = msgspec.structs.replace(call, draw=self.origin.draw)
        return again, msgspec.structs.replace(options, given=given)

    def cut(self, requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
        """Requests whose pieces end where the event's piece began and where it ended, for the weights that computed
        them. Raises InvalidRequestError."""
        limits = [sampling.max_tokens for request in requests for sampling in request.sampling]
        if len(limits) != len(self.told) or any(
            one.tokens > limit for one, limit in zip(self.told, limits, strict=True)
        ):
            raise InvalidRequestError(self.field, NOT_OURS)
        told, cut = iter(self.told), list[GenerateRequest]()
        for request in requests:
            of_request = [next(told) for _ in request.sampling]
            cuts, weights = [_cuts(one) for one in of_request], [one.weights for one in of_request]
            cut.append(msgspec.structs.replace(request, cuts=cuts, weights=weights))
        return cut

    def begin(
        self, request: GenerateRequest, given: Sequence[Sequence[int]], field: str, vocab_size: int
    ) -> GenerateRequest:
        """The request with the tokens that the client has of each choice, where an answer can go on from them alone.
        Raises InvalidRequestError when they are others than those that were told."""
        if len(given) != len(self.told):
            raise InvalidRequestError(field, f"has {len(given)} entries; the answer has {len(self.told)} choices")
        for i, (tokens, told) in enumerate(zip(given, self.told, strict=True)):
            check_in_vocabulary(f"{field}[{i}]", tokens, vocab_size)
            if len(tokens) != told.tokens or read_on(NOTHING_READ, tokens) != told.check:
                raise InvalidRequestError(f"{field}[{i}]", "are not the tokens that were told up to there")
        pairs = zip(given, self.told, request.sampling, strict=True)
        begun = [tokens if _goes_on(told, sampling) else () for tokens, told, sampling in pairs]
        return msgspec.structs.replace(request, begun=begun)

    async def begin_recalled(self, requests: Sequence[GenerateRequest], recall: Recall) -> list[GenerateRequest]:
        """The requests with the tokens that `recall` finds of each choice; those of the others are computed again."""
        wanted = [sampling for request in requests for sampling in request.sampling]
        found = iter(await asyncio.gather(*map(partial(self._recalled, recall), self.told, wanted)))
        return [msgspec.structs.replace(request, begun=[next(found) for _ in request.sampling]) for request in requests]

    async def _recalled(self, recall: Recall, told: Told, sampling: SamplingParams) -> Sequence[int]:
        if not told.tokens or not _goes_on(told, sampling):
            return ()
        return await recall(self.origin.request_id, told.tokens, told.check)


def _goes_on(told: Told, sampling: SamplingParams) -> bool:
    """Whether an answer can go on from its tokens alone."""
    needs_more = (sampling.grammar, sampling.logprobs, sampling.prompt_logprobs) != (None, None, None)
    return not (needs_more or told.ended or told.tokens >= sampling.max_tokens)


def _told(text: str) -> Told:
    ended = text.endswith("!")
    tokens, piece, events, check, *weights = text.rstrip("!").split(".")  # an earlier release tells no weights
    piece_tokens, tag = min(int(piece), int(tokens)), int(weights[0], 16) if weights else 0
    return Told(int(tokens), piece_tokens, int(events), int(check, 16), ended, tag)


def _cuts(told: Told) -> Sequence[int]:
    return (told.tokens - told.piece,) if told.ended else (told.tokens - told.piece, told.tokens)
