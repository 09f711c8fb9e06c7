"""Requests of a day: rates from a file, Poisson arrivals within each ten minutes, lengths from a trace or a
distribution."""

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime.errors import ConfigError
from simulator.compiled import Floats, Ints
from simulator.requests import Requests, alike

BIN_S = 600.0
BINS_PER_DAY = 144
MAX_PROMPT = 8192
MAX_OUTPUT = 2048

Lengths = Callable[[np.random.Generator, int], tuple[Ints, Ints]]  # n -> (prompt tokens [n], output tokens [n])


def read_rates(path: Path) -> Floats:
    """Requests per second of each ten minutes, from lines `t_s,requests_per_s`. Raises ConfigError."""
    try:
        with path.open(newline="") as file:
            return np.array([float(line["requests_per_s"]) for line in csv.DictReader(file)])
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(str(path), f"is no table of t_s,requests_per_s: {error}") from error


def day_of(rates: Floats, day: int) -> Floats:
    """The rates [144] of a day, counted from 0. Raises ConfigError when the file has no such day."""
    if not 0 <= day < len(rates) // BINS_PER_DAY:
        raise ConfigError("day", f"{day} is not one of the {len(rates) // BINS_PER_DAY} days in the file")
    return rates[day * BINS_PER_DAY : (day + 1) * BINS_PER_DAY]


def chat_lengths(dice: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    """Prompts lognormal with a mean of about 1,000 tokens (sigma 1), answers exponential with a mean of 250: the shapes
    that ServeGen reports for chat, with round numbers."""
    prompt = np.clip(dice.lognormal(np.log(1000) - 0.5, 1.0, count), 1, MAX_PROMPT).astype(np.int64)
    output = np.clip(dice.exponential(250.0, count), 1, MAX_OUTPUT).astype(np.int64)
    return prompt, output


def trace_lengths(path: Path) -> Lengths:
    """Lengths drawn at random from a gzipped table `TIMESTAMP,ContextTokens,GeneratedTokens`. Raises ConfigError."""
    try:
        with gzip.open(path, "rt", newline="") as file:
            rows = [(int(line["ContextTokens"]), int(line["GeneratedTokens"])) for line in csv.DictReader(file)]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(str(path), f"is no table of context and generated tokens: {error}") from error
    pairs = np.maximum(1, np.array(rows, np.int64))

    def draw(dice: np.random.Generator, count: int) -> tuple[Ints, Ints]:
        chosen = pairs[dice.integers(len(pairs), size=count)]
        return np.ascontiguousarray(chosen[:, 0]), np.ascontiguousarray(chosen[:, 1])

    return draw


def requests_of(rates: Floats, lengths: Lengths, seed: int, hit_rate: float = 0.0, bin_s: float = BIN_S) -> Requests:
    """Requests with Poisson arrivals, at a constant rate within each `bin_s`. The share `hit_rate` of each prompt is
    cached."""
    dice = np.random.default_rng(seed)
    counts = dice.poisson(rates * bin_s)
    starts = np.repeat(np.arange(len(rates)) * bin_s, counts)
    arrival_s = np.sort(starts + dice.random(len(starts)) * bin_s)
    prompt, output = lengths(dice, len(arrival_s))
    return alike(arrival_s, prompt, np.maximum(1, np.round(prompt * (1 - hit_rate)).astype(np.int64)), output)
