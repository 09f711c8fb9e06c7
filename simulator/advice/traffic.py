"""The requests that layouts are compared on, at any rate: random ones, or those of a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from simulator.advice.prefixes import Found, find
from simulator.compiled import Floats, Ints
from simulator.requests import NOBODY, Requests, alike

PARTS = 20  # of a trace, drawn with replacement


class Traffic(Protocol):
    def requests(self, rate: float, seed: int, cache_tokens: int) -> Requests:
        """Requests at `rate` per second. The same seed gives the same requests, sooner or later after one another.
        `cache_tokens`: KV memory of all workers."""


@dataclass(frozen=True, slots=True)
class RandomTraffic:
    """Poisson arrivals; lengths uniform between the bounds."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    count: int
    cached: float = 0.0  # share of each prompt

    def requests(self, rate: float, seed: int, cache_tokens: int = 0) -> Requests:
        dice = np.random.default_rng(seed)
        arrival_s = np.cumsum(dice.exponential(1 / rate, self.count))
        prompt = dice.integers(self.prompt[0], self.prompt[1] + 1, self.count)
        output = dice.integers(self.output[0], self.output[1] + 1, self.count)
        return alike(arrival_s, prompt, _uncached(prompt, self.cached), output)


@dataclass(frozen=True, slots=True)
class TraceTraffic:
    """The requests of a trace in their order. Seed 0 takes them as they are; another one draws PARTS parts of equal
    duration with replacement (a block bootstrap), which keeps bursts shorter than a part."""

    arrival_s: Floats  # [requests], rising
    prompt: Ints
    output: Ints
    cached: float = 0.0  # share of each prompt, where `hash_ids` are not known
    hash_ids: Sequence[Sequence[int]] = ()  # of each prompt: one for each `block_tokens`
    block_tokens: int = 1
    _found: dict[int, Found] = field(default_factory=dict)  # by the size of the caches

    @property
    def rate(self) -> float:
        return len(self.arrival_s) / self.duration_s

    @property
    def duration_s(self) -> float:
        return float(self.arrival_s[-1] - self.arrival_s[0])

    def requests(self, rate: float, seed: int, cache_tokens: int = 0) -> Requests:
        """Each request finds in the caches what it found in the trace's own order, on all workers where its holder does
        not come before it."""
        times, order = self.arrival_s - self.arrival_s[0], np.arange(len(self.arrival_s))
        if seed:
            part_s = self.duration_s / PARTS
            part_of = np.minimum(PARTS - 1, times // part_s).astype(np.int64)
            drawn = np.random.default_rng(seed).integers(PARTS, size=PARTS)
            order = np.concatenate([np.flatnonzero(part_of == part) for part in drawn])
            moved = np.concatenate([np.full((part_of == part).sum(), n - part) for n, part in enumerate(drawn)])
            times = times[order] + moved * part_s
        arrival_s, prompt, output = times * self.rate / rate, self.prompt[order], self.output[order]
        if not self.hash_ids:
            return alike(arrival_s, prompt, _uncached(prompt, self.cached), output)
        if cache_tokens not in self._found:
            self._found[cache_tokens] = find(self.prompt, self.hash_ids, self.block_tokens, cache_tokens)
        uncached, elsewhere, holder = (column[order] for column in self._found[cache_tokens])
        holder = _last_before(holder, order)
        return Requests(arrival_s, prompt, uncached, output, np.where(holder == NOBODY, uncached, elsewhere), holder)


def _uncached(prompt: Ints, cached: float) -> Ints:
    return np.maximum(1, np.round(prompt * (1 - cached)).astype(np.int64))


def _last_before(wanted: Ints, order: Ints) -> Ints:
    """For each place of `order`, the last earlier place of the request `wanted` there; NOBODY: there is none.

    Invariant: a wanted request has a lower number than the one that wants it."""
    places = np.arange(len(order))
    keys = np.sort(order * len(order) + places)
    last = keys[np.searchsorted(keys, wanted * len(order) + places) - 1]
    return np.where(last // len(order) == wanted, last % len(order), NOBODY)
