"""How many GPUs each of several models may hold, where all together want more than there are. Pure."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace


class Claim(Struct, frozen=True):
    """Of one model, in GPUs. `least`: what the model holds before others get more than their own least."""

    holds: int  # workers that start, leave or sleep included
    wants: int = 0  # whatever the others hold
    least: int = 0
    weight: int = 1


def share_of(mine: Claim, others: Sequence[Claim], gpus: int) -> int:
    """The most that a model may hold now. Each model gets its least, and then what it wants, one GPU after the other to
    the model that has the fewest for its weight; what nobody else wants is mine. While others hold more than their
    share, the model keeps what it holds and does not grow."""
    claims = [replace(mine, wants=gpus), *others]
    given = [0] * len(claims)
    for bounds in ([claim.least for claim in claims], [claim.wants for claim in claims]):
        for _ in range(gpus - sum(given)):
            able = [index for index, bound in enumerate(bounds) if given[index] < bound]
            if not able:
                break
            given[min(able, key=lambda index: (given[index] + 1) / claims[index].weight)] += 1
    return min(given[0], max(mine.holds, gpus - sum(claim.holds for claim in others)))
