"""The traffics that whole systems are compared on, in the format of Mooncake's traces, which `baton bench` reads.

A seed takes another window of a recorded trace, and draws other agents. Gaps between arrivals are exponential, one
request a second in the mean; the rate scales them.
"""

import csv
import gzip
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from baton.bench.workload import TRACE_BLOCK, TraceLine, trace_lines
from benchmarks.quality.traffic import Agents, Draft
from runtime.errors import ConfigError

CONVERSATIONS, CODE, AGENTS = "conversations", "code", "agents"
KINDS = (CONVERSATIONS, CODE, AGENTS)
WINDOW = 700  # requests of a recorded trace from the begin of one seed's window to that of the next
ID_SPACE = 1 << 16  # hash ids of one segment

AGENTS_OF_CODE = Agents(
    preambles=6,
    preamble_tokens=12 * TRACE_BLOCK,
    calls=(4, 16),
    result_tokens=(512, 2560),
    answer_tokens=(30, 286),
    active=20,
)
"""240 requests have 13.0k tokens in and 156 out in the mean; 87 % of the prompt tokens are the beginning of an earlier
prompt. With 120 requests it is 11.4k in, 154 out, 84 %, because histories have grown less."""


def traffic(kind: str, files: Mapping[str, Path | None], count: int, seed: int, longest: int) -> list[TraceLine]:
    """`count` requests. Those of more than `longest` tokens, prompt and answer, are left out of recorded traces. Raises
    ConfigError."""
    if kind == AGENTS:
        found = [_agent_line(draft) for draft in itertools.islice(AGENTS_OF_CODE.drafts(random.Random(seed)), count)]
    else:
        path = files[kind]
        if path is None:
            raise ConfigError(f"--{kind}", f"give the file of the trace, or leave {kind} out of --traces")
        whole = trace_lines(path) if kind == CONVERSATIONS else list(_code_lines(path))
        fitting = [line for line in whole if line.input_length + line.output_length <= longest]
        found = fitting[seed * WINDOW :][:count]
        if len(found) < count:
            problem = (
                f"{path} has {len(fitting)} requests of at most {longest} tokens, too few for {count} of seed {seed}"
            )
            raise ConfigError("--requests", problem)
    return _at_random(found, seed)


def write_trace(path: Path, lines: Sequence[TraceLine]) -> Path:
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    return path


def shareable(lines: Sequence[TraceLine]) -> float:
    """Share of the prompt tokens that a cache without a limit would hold when they come."""
    known: set[int] = set()
    shared = 0
    for line in lines:
        blocks = sum(1 for _ in itertools.takewhile(known.__contains__, line.hash_ids))
        shared += min(blocks * TRACE_BLOCK, line.input_length)
        known.update(line.hash_ids)
    return shared / sum(line.input_length for line in lines)


def _agent_line(draft: Draft) -> TraceLine:
    """Segments begin with a block: all but the last are rounded down to whole blocks."""
    segments, answer = draft
    ids = [what * ID_SPACE + k for what, tokens in segments[:-1] for k in range(tokens // TRACE_BLOCK)]
    what, last = segments[-1]
    prompt = len(ids) * TRACE_BLOCK + last
    return TraceLine(0, prompt, answer, ids + [what * ID_SPACE + k for k in range(-(-last // TRACE_BLOCK))])


def _code_lines(path: Path) -> Iterator[TraceLine]:
    """Azure's trace of code completion has lengths alone: no prompt shares anything with another. Raises
    ConfigError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for row in csv.DictReader(file):
                yield TraceLine(0, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise ConfigError("--code", f"{path} is no csv(.gz) with ContextTokens and GeneratedTokens: {error}") from error


def _at_random(lines: Sequence[TraceLine], seed: int) -> list[TraceLine]:
    dice, now_ms, placed = random.Random(seed), 0.0, []
    for line in lines:
        placed.append(TraceLine(round(now_ms), line.input_length, line.output_length, line.hash_ids))
        now_ms += dice.expovariate(1.0) * 1e3
    return placed
