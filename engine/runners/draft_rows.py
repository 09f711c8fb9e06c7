"""Samples the rows of a step, those of a draft one after the other: what masks, penalties and noise of a row read of
its sequence is what they would read without drafts."""

from collections.abc import Callable, Sequence as Run

from engine.sequences.batch import SampledToken, ScheduledSequence
from engine.sequences.sequence import Sequence

Draw = Callable[[list[int], list[Sequence]], list[SampledToken]]
"""Samples rows, each for the first unknown token of its sequence."""


def sampled_in_turn(items: Run[ScheduledSequence], draw: Draw) -> list[SampledToken]:
    """One token a row, `num_samples` rows of each item; rows behind a wrong guess repeat the token in its place. Where
    nothing is guessed, `draw` is called once."""
    turns, num_rows = [], 0
    for item in items:
        if item.sample:
            turns.append((num_rows, item))
            num_rows += item.num_samples
    try:
        return _sampled(turns, num_rows, draw)
    finally:
        for item in items:
            if item.draft:
                item.sequence.num_pending_tokens = len(item.draft)


def _sampled(turns: list[tuple[int, ScheduledSequence]], num_rows: int, draw: Draw) -> list[SampledToken]:
    """turns: the first row of each sampled item."""
    tokens: dict[int, SampledToken] = {}
    place = 0
    while turns:
        drawn = draw([first + place for first, _ in turns], [item.sequence for _, item in turns])
        going_on = []
        for (row, item), token in zip(turns, drawn, strict=True):
            tokens.update(dict.fromkeys(range(row + place, row + item.num_samples), token))
            if place < len(item.draft) and token.token_id == item.draft[place]:
                going_on.append((row, item))
        for _, item in going_on:
            item.sequence.num_pending_tokens -= 1  # the guess is known to be right
        turns, place = going_on, place + 1
    return [tokens[row] for row in range(num_rows)]
