"""Which sequences are guessed ahead, how far, and for how long that pays. Pure bookkeeping.

Invariant: a draft changes what a step computes, and no answer. It takes no block, ends no sequence before its last
token, and its sequence has no other step on its way.
"""

from typing import Final

from msgspec import Struct

from engine.drafts.drafter import Drafter
from engine.sequences.batch import SampledToken, ScheduledSequence
from engine.sequences.sequence import Sequence

# A CPU needs 1.8 times as long for a step of 2 rows as for one of a single row, and 2.4 times for 16. So a draft costs
# about a step, however long it is, and each right guess saves one.
FREE_ROWS: Final = 16  # of a step with drafts
FIRST: Final = 7  # tokens of a sequence's first draft
LEAST: Final = 3  # of later ones
TRIAL: Final = 2.0  # steps that a sequence's drafts may cost before any guess was right
FULL: Final = 8.0  # or since then, however many were right
FORGIVEN: Final = 1 / 128  # of a step, by each token of the answer


class Trust(Struct):
    """What a sequence's drafts were worth so far."""

    credit: float  # steps that its drafts may still cost
    length: int  # tokens of its next draft
    position: int  # of its output when the credit was last told


class Speculation:
    """Engine thread only."""

    def __init__(
        self,
        drafter: Drafter | None,
        eos_token_ids: frozenset[int] = frozenset(),
        depth: int = 0,
    ) -> None:
        """drafter: None: nothing is guessed. depth: of the runner."""
        self.num_drafted = 0
        self.num_accepted = 0
        self._drafter = drafter
        self._depth = depth
        self._eos_token_ids = eos_token_ids
        self._trust: dict[Sequence, Trust] = {}

    def apart(
        self, decode: list[ScheduledSequence], room: int, block_size: int
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
        """Returns the decodes without a draft, and those with one. Who has a draft once a step on its way has ended is
        in neither. room: tokens that the step may compute."""
        left = min(FREE_ROWS, room) - len(decode)
        if self._drafter is None or left <= 0:
            return decode, []
        wanted = []
        for item in decode:
            if left <= 0:
                break
            if most := min(left, self._most(item.sequence, block_size)):
                wanted.append((item.sequence, most))
                left -= most
        if not wanted:
            return decode, []
        guesses = self._drafter.draft(wanted)
        drafts = {sequence: self._cut(sequence, guess) for (sequence, _), guess in zip(wanted, guesses, strict=True)}
        plain, verified = [], []
        for item in decode:
            sequence, draft = item.sequence, drafts.get(item.sequence)
            if not draft:
                plain.append(item)
            elif sequence.num_pending_tokens:
                self._trust[sequence].credit -= 1
            else:
                verified.append(ScheduledSequence(sequence, item.start, 1 + len(draft), sample=True, draft=draft))
        return plain, verified

    def right(self, item: ScheduledSequence, tokens: list[SampledToken]) -> list[SampledToken]:
        """A draft was verified: returns what the sequence says, the tokens up to the first that was not guessed."""
        pairs = enumerate(zip(tokens[:-1], item.draft, strict=True))
        num_accepted = next((at for at, (token, guess) in pairs if token.token_id != guess), len(item.draft))
        self._learn(item, num_accepted)
        return tokens[: num_accepted + 1]

    def _learn(self, item: ScheduledSequence, num_accepted: int) -> None:
        drafted, trust = len(item.draft), self._trust.get(item.sequence)
        item.sequence.num_accepted_tokens += num_accepted
        self.num_drafted += drafted
        self.num_accepted += num_accepted
        if trust is not None:  # else the sequence has ended
            trust.credit = min(FULL, trust.credit + num_accepted - 1)
            more = 2 * trust.length if num_accepted == drafted else 1 + num_accepted
            trust.length = min(FREE_ROWS, max(LEAST, more))

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if self._trust.pop(sequence, None) is not None and self._drafter is not None:
            self._drafter.forget(sequence)

    def _most(self, sequence: Sequence, block_size: int) -> int:
        """Tokens that may be guessed for a sequence now: no more than its blocks have room for, and fewer than end
        it."""
        if sequence.prefill_only or (self._depth and not sequence.is_plain):
            return 0
        position = sequence.next_position
        trust = self._trust.get(sequence)
        if trust is None:
            trust = self._trust[sequence] = Trust(TRIAL, FIRST, position)
        if trust.credit < TRIAL:
            trust.credit = min(TRIAL, trust.credit + (position - trust.position) * FORGIVEN)
        trust.position = position
        slots = len(sequence.block_table) * block_size - sequence.num_known_tokens
        if trust.credit < 1:
            return 0
        return max(0, min(trust.length, slots, sequence.sampling.max_tokens - position - 1))

    def _cut(self, sequence: Sequence, guess: list[int]) -> list[int]:
        """The guess without tokens that would end the sequence, and what follows them."""
        stops = sequence.sampling.stop_token_ids
        for at, token_id in enumerate(guess):
            if token_id in self._eos_token_ids or token_id in stops:
                return guess[:at]
        return guess
