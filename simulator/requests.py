"""The requests that a simulation runs."""

from typing import NamedTuple

from simulator.compiled import Floats, Ints


class Requests(NamedTuple):
    """One column per field, [requests], in order of arrival."""

    arrival_s: Floats
    prompt: Ints  # tokens
    uncached: Ints  # of these, not in a prefix cache
    output: Ints  # tokens, at least 1
