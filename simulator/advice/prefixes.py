"""What prefix caches hold of the prompts of a trace."""

from collections import OrderedDict
from collections.abc import Sequence

from simulator.compiled import Ints


def uncached(prompt: Ints, hash_ids: Sequence[Sequence[int]], block_tokens: int, cache_tokens: int) -> Ints:
    """[requests] tokens of each prompt that are not cached when the requests come in this order.

    All workers together are one cache, because the router sends requests to where their prefixes are. The block that
    was used longest ago goes first, of a prompt the last one. `hash_ids` of each prompt: one for each `block_tokens`.
    """
    held: OrderedDict[int, None] = OrderedDict()
    left = prompt.copy()
    for number, ids in enumerate(hash_ids):
        cached = next((place for place, block in enumerate(ids) if block not in held), len(ids))
        left[number] -= min(cached * block_tokens, left[number] - 1)
        for block in reversed(ids):
            held[block] = None
            held.move_to_end(block)
        while len(held) > cache_tokens // block_tokens:
            held.popitem(last=False)
    return left
