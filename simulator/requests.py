"""The requests that a simulation runs."""

from typing import NamedTuple

import numpy as np

from simulator.compiled import Floats, Ints

NOBODY = -1  # no request, or no worker


class Requests(NamedTuple):
    """One column per field, [requests], in order of arrival.

    Invariant: `holder` comes earlier, and `uncached` <= `elsewhere`."""

    arrival_s: Floats
    prompt: Ints  # tokens
    uncached: Ints  # of these, not in the prefix caches of the workers that ran and decoded `holder`
    output: Ints  # tokens, at least 1
    elsewhere: Ints  # tokens of the prompt that all other workers have not cached
    holder: Ints  # the request with the longest part of the prompt; NOBODY: all workers have cached the same


def alike(arrival_s: Floats, prompt: Ints, uncached: Ints, output: Ints) -> Requests:
    """Requests that find the same in every worker's cache."""
    return Requests(arrival_s, prompt, uncached, output, uncached, np.full(len(prompt), NOBODY))
