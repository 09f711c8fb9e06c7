"""What prefix caches hold of the prompts of a trace, and where."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from simulator.compiled import Ints
from simulator.requests import NOBODY

SEVERAL: Final = -1  # blocks, in place of the one that follows


class Found(NamedTuple):
    """Columns of `Requests`."""

    uncached: Ints
    elsewhere: Ints
    holder: Ints


def find(prompt: Ints, hash_ids: Sequence[Sequence[int]], block_tokens: int, cache_tokens: int) -> Found:
    """What each prompt finds when the requests come in this order.

    The memory of all workers is one, of which the block that was used longest ago goes first, of a prompt the last one.
    What earlier prompts continued in several ways, such as a preamble, is cached on every worker; what follows it, on
    those of the request that used it last. `hash_ids` of each prompt: one for each `block_tokens`.
    """
    users: OrderedDict[int, int] = OrderedDict()  # of each cached block: the request that used it last
    followers: dict[int, int] = {}  # the block that came after each of them, or SEVERAL
    found = Found(prompt.copy(), prompt.copy(), np.full(len(prompt), NOBODY))
    for number, ids in enumerate(hash_ids):
        cached = next((place for place, block in enumerate(ids) if block not in users), len(ids))
        shared = next((place for place in range(cached, 0, -1) if followers.get(ids[place - 1]) == SEVERAL), 0)
        found.uncached[number] -= min(cached * block_tokens, prompt[number] - 1)
        found.elsewhere[number] -= min(shared * block_tokens, prompt[number] - 1)
        if shared < cached:
            found.holder[number] = users[ids[cached - 1]]
        for block, after in pairwise(ids):
            followers[block] = after if followers.get(block, after) == after else SEVERAL
        for block in reversed(ids):
            users[block] = number
            users.move_to_end(block)
        while len(users) > cache_tokens // block_tokens:
            followers.pop(users.popitem(last=False)[0], None)
    return found
