"""The serving cluster as a discrete-event simulation, compiled by numba: `advance` simulates up to a given time.

A request waits in the routers' central queue, first come, first served, until a prefill worker is idle and a decode
worker has room for its KV. Its prompt then runs alone. The first token comes at the end of the prompt, and the request
decodes with all others of its decode worker.

Decoding is fluid: steps need not be whole. Each sequence of a worker gains one token per step, so that a sequence ends
when its worker's count of steps has grown by its number of tokens. With B sequences and K tokens of context a step
takes a + b B + c K seconds, and K grows by B per step: x steps take (a + b B + c K) x + c B x^2 / 2.

Times are in seconds, KV memory in tokens.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import Floats, Ints, bucket, decode_seconds, entry, pairs_of, part, prefill_seconds
from simulator.requests import Requests

Workers = NDArray[np.void]  # of WORKER
Worker = Any  # one element of Workers

IDLE = np.inf
NOTHING, PROMPTS, SEQUENCES = range(3)  # what a worker takes
ARRIVAL, PROMPT_END, SEQUENCE_END, UNTIL = range(4)  # kinds of events; UNTIL: the time that was asked for
TTFT_MET, FINISHED, BOTH_MET, OUTPUT_TOKENS = range(4)  # counters
NUM_COUNTERS = 4


class Model(NamedTuple):
    prefill: tuple[float, float, float]  # floor, per token, per pair
    decode: tuple[float, float, float]  # floor, per sequence, per token of context
    ttft_s: float  # target
    itl_s: float  # target
    kv_tokens: int  # of a decode worker


WORKER = np.dtype(
    [
        ("takes", "i8"),  # NOTHING, PROMPTS or SEQUENCES
        ("prompt", "i8"),  # the request whose prompt runs, while one does
        ("successor", "i8"),  # the decode worker of this request
        ("reserved", "i8"),  # KV tokens of all requests sent to the worker to decode
        ("sent", "i8"),  # requests sent to the worker whose prompts still run
        ("batch", "i8"),  # sequences that decode: B
        ("context", "f8"),  # their tokens of context: K
        ("steps", "f8"),  # done since the start
        ("at_s", "f8"),  # the time of `steps` and `context`
    ],
    align=True,
)


class State(NamedTuple):
    now_s: Floats  # [1]
    cursor: Ints  # [2]: the first request that waits, the first that has not arrived
    workers: Workers  # [workers]
    prompt_end_s: Floats  # [workers]: end of the prompt that runs; IDLE without one
    end_s: Floats  # [workers]: end of the next sequence; IDLE without one
    ends: Floats  # [workers, max_running] heap of the counts of steps at which sequences end
    ending: Ints  # [workers, max_running]: the requests of `ends`
    first_s: Floats  # [requests]: when the first token came
    counters: Ints  # [NUM_COUNTERS]
    ttft: Ints  # [BUCKETS] histogram
    itl: Ints  # [BUCKETS] histogram


@entry
def advance(until_s: float, model: Model, requests: Requests, state: State) -> None:
    while True:
        while state.cursor[0] < state.cursor[1] and _started(model, requests, state):
            pass
        next_s, kind, worker = _next_event(until_s, requests, state)
        state.now_s[0] = next_s
        if kind == UNTIL:
            return
        if kind == ARRIVAL:
            state.cursor[1] += 1
        elif kind == PROMPT_END:
            _end_prompt(worker, next_s, model, requests, state)
        else:
            _end_sequence(worker, next_s, model, requests, state)


@part
def _started(model: Model, requests: Requests, state: State) -> bool:
    """Starts the first waiting request if workers have room for it; returns whether they had."""
    request = state.cursor[0]
    need = requests.prompt[request] + requests.output[request]
    p = _idle_worker(state.workers, state.prompt_end_s)
    if p < 0:
        return False
    d = _roomiest_worker(state.workers, need, model.kv_tokens, state.ends.shape[1])
    if d < 0:
        return False
    count = requests.uncached[request]
    pairs = pairs_of(requests.prompt[request] - count, count)
    floor_s, token_s, pair_s = model.prefill
    worker, successor = state.workers[p], state.workers[d]
    state.prompt_end_s[p] = state.now_s[0] + prefill_seconds(floor_s, token_s, pair_s, count, pairs)
    worker.prompt = request
    worker.successor = d
    successor.reserved += need
    successor.sent += 1
    state.cursor[0] += 1
    return True


@part
def _idle_worker(workers: Workers, prompt_end_s: Floats) -> int:
    for w in range(len(workers)):
        if workers[w].takes == PROMPTS and prompt_end_s[w] == IDLE:
            return w
    return -1


@part
def _roomiest_worker(workers: Workers, need: int, kv_tokens: int, max_running: int) -> int:
    """The decode worker with the least reserved KV that has room for `need` tokens of it; -1: none."""
    found = -1
    for w in range(len(workers)):
        worker = workers[w]
        if (
            worker.takes == SEQUENCES
            and worker.batch + worker.sent < max_running
            and worker.reserved + need <= kv_tokens
            and (found < 0 or worker.reserved < workers[found].reserved)
        ):
            found = w
    return found


@part
def _next_event(until_s: float, requests: Requests, state: State) -> Any:
    """The next event: (time, kind, worker)."""
    prompt_end_s, end_s = state.prompt_end_s, state.end_s
    next_s, kind, at = until_s, UNTIL, -1
    arriving = state.cursor[1]
    if arriving < len(requests.arrival_s) and requests.arrival_s[arriving] < next_s:
        next_s, kind = requests.arrival_s[arriving], ARRIVAL
    for w in range(len(prompt_end_s)):
        if prompt_end_s[w] < next_s:
            next_s, kind, at = prompt_end_s[w], PROMPT_END, w
        if end_s[w] < next_s:
            next_s, kind, at = end_s[w], SEQUENCE_END, w
    return next_s, kind, at


@part
def _end_prompt(p: int, now_s: float, model: Model, requests: Requests, state: State) -> None:
    """The first token of the request; its decode worker decodes it from now on."""
    request, d = state.workers[p].prompt, state.workers[p].successor
    state.prompt_end_s[p] = IDLE
    ttft_s = now_s - requests.arrival_s[request]
    state.first_s[request] = now_s
    state.ttft[bucket(ttft_s * 1e3)] += 1
    state.counters[TTFT_MET] += ttft_s <= model.ttft_s
    worker = state.workers[d]
    _decode_until(now_s, model, worker)
    _push(worker.batch, state.ends[d], state.ending[d], worker.steps + requests.output[request] - 1, request)
    worker.sent -= 1
    worker.batch += 1
    worker.context += requests.prompt[request] + 1
    state.end_s[d] = _next_end(model, worker, state.ends[d, 0])


@part
def _end_sequence(d: int, now_s: float, model: Model, requests: Requests, state: State) -> None:
    """The last token of a request, whose KV is freed."""
    worker = state.workers[d]
    _decode_until(now_s, model, worker)
    request = _pop(worker.batch, state.ends[d], state.ending[d])
    prompt, output = requests.prompt[request], requests.output[request]
    worker.batch -= 1
    worker.context = max(0.0, worker.context - prompt - output) if worker.batch else 0.0
    worker.reserved -= prompt + output
    state.end_s[d] = _next_end(model, worker, state.ends[d, 0])
    first_s = state.first_s[request]
    met = first_s - requests.arrival_s[request] <= model.ttft_s
    if output > 1:
        itl_s = (now_s - first_s) / (output - 1)
        state.itl[bucket(itl_s * 1e3)] += 1
        met = met and itl_s <= model.itl_s
    state.counters[FINISHED] += 1
    state.counters[OUTPUT_TOKENS] += output
    state.counters[BOTH_MET] += met


@part
def _decode_until(now_s: float, model: Model, worker: Worker) -> None:
    left_s = now_s - worker.at_s
    if worker.batch > 0 and left_s > 0:
        step_s = _step_s(model, worker)
        growth = model.decode[2] * worker.batch
        # root of growth / 2 * x^2 + step_s * x = left_s, in the form that is exact for a small growth
        steps = 2 * left_s / (step_s + np.sqrt(step_s * step_s + 2 * growth * left_s))
        worker.steps += steps
        worker.context += steps * worker.batch
    worker.at_s = now_s


@part
def _next_end(model: Model, worker: Worker, first_end: float) -> Any:
    """The time of the worker's step number `first_end`, at which its next sequence ends; IDLE without a sequence."""
    if worker.batch == 0:
        return IDLE
    steps = max(0.0, first_end - worker.steps)
    return worker.at_s + _step_s(model, worker) * steps + model.decode[2] * worker.batch * steps * steps / 2


@part
def _step_s(model: Model, worker: Worker) -> Any:
    floor_s, sequence_s, token_s = model.decode
    return decode_seconds(floor_s, sequence_s, token_s, worker.batch, worker.context)


@part
def _push(size: int, keys: Floats, values: Ints, key: float, value: int) -> None:
    """Adds an entry to a heap of `size` entries."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if keys[parent] <= key:
            break
        keys[i], values[i] = keys[parent], values[parent]
        i = parent
    keys[i], values[i] = key, value


@part
def _pop(size: int, keys: Floats, values: Ints) -> Any:
    """Takes the entry with the smallest key from a heap of `size` entries; returns its value."""
    top, key, value = values[0], keys[size - 1], values[size - 1]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[i], values[i] = keys[child], values[child]
        i = child
    keys[i], values[i] = key, value
    return top
