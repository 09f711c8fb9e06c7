"""The serving cluster as discrete events, compiled by numba: one call moves it on to a given time.

Owns the arithmetic alone; `serving.py` owns the arrays and their meaning. A request waits in the routers' central queue
(first come, first served) until a prefill worker is idle and a decode worker has room for its KV; its prompt then runs
alone; with the end of the prompt comes its first token, and it decodes with all others of its worker. Decoding is a
fluid: all sequences of a worker gain tokens at one rate, one per step, so that a sequence ends when its worker's count
of steps `v` has grown by its number of tokens. With B sequences and K tokens of context a step takes a + b B + c K,
and K grows by B per step: dv steps take (a + b B + c K) dv + c B dv^2 / 2.
"""

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

IDLE = np.inf
OPEN, CLOSED = 1, 0  # of a worker: takes requests or not

# Counters, in one array so that the caller reads them at once.
STARTED, FIRST_TOKENS, TTFT_MET, FINISHED, BOTH_MET, OUTPUT_TOKENS = range(6)
NUM_COUNTERS = 6
BUCKETS = 256  # of the histograms of TTFT and ITL, each 4 % wider than the last
BUCKET_LOG = np.log(1.04)


@numba.njit(cache=True)
def _bucket(milliseconds: float) -> int:
    return min(BUCKETS - 1, max(0, int(np.log(max(milliseconds, 1.0)) / BUCKET_LOG)))


@numba.njit(cache=True)
def _move(w: int, now_s: float, model: Floats, batch: Ints, context: Floats, v: Floats, at_s: Floats) -> None:
    """Lets worker `w` decode until `now_s`."""
    if batch[w] > 0 and now_s > at_s[w]:
        step_s = model[3] + model[4] * batch[w] + model[5] * context[w]
        growth = model[5] * batch[w]
        left_s = now_s - at_s[w]
        # root of growth / 2 * x^2 + step_s * x = left_s, in the form that is exact for a small growth
        steps = 2 * left_s / (step_s + np.sqrt(step_s * step_s + 2 * growth * left_s))
        v[w] += steps
        context[w] += steps * batch[w]
    at_s[w] = now_s


@numba.njit(cache=True)
def _next_end(w: int, model: Floats, batch: Ints, context: Floats, v: Floats, at_s: Floats, heap_v: Floats) -> Any:
    if batch[w] == 0:
        return IDLE
    steps = max(0.0, heap_v[w, 0] - v[w])
    step_s = model[3] + model[4] * batch[w] + model[5] * context[w]
    return at_s[w] + step_s * steps + model[5] * batch[w] * steps * steps / 2


@numba.njit(cache=True)
def _push(w: int, size: int, key: float, request: int, heap_v: Floats, heap_request: Ints) -> None:
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap_v[w, parent] <= key:
            break
        heap_v[w, i] = heap_v[w, parent]
        heap_request[w, i] = heap_request[w, parent]
        i = parent
    heap_v[w, i] = key
    heap_request[w, i] = request


@numba.njit(cache=True)
def _pop(w: int, size: int, heap_v: Floats, heap_request: Ints) -> Any:
    """Takes the smallest of `size`; returns its request."""
    top = heap_request[w, 0]
    key = heap_v[w, size - 1]
    request = heap_request[w, size - 1]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and heap_v[w, child + 1] < heap_v[w, child]:
            child += 1
        if heap_v[w, child] >= key:
            break
        heap_v[w, i] = heap_v[w, child]
        heap_request[w, i] = heap_request[w, child]
        i = child
    heap_v[w, i] = key
    heap_request[w, i] = request
    return top


@numba.njit(cache=True)
def advance(
    until_s: float,
    model: Floats,  # [8] s: prefill floor, per token, per pair; decode floor, per sequence, per token; TTFT, ITL target
    clock_s: Floats,  # [1]: now
    arrival_s: Floats,  # [n], rising, and for each request
    uncached: Ints,  # [n] prompt tokens to compute
    prompt: Ints,  # [n]
    output: Ints,  # [n] tokens, at least 1
    first_s: Floats,  # [n] out: when the first token came
    cursor: Ints,  # [2]: the first request that waits, the first that has not arrived
    p_open: Ints,  # [workers]
    p_busy_s: Floats,  # [workers]: end of its prompt, IDLE without one
    p_request: Ints,  # [workers]
    p_decode: Ints,  # [workers]: where that prompt's request will decode
    p_work_s: Floats,  # [workers]: computing time so far
    d_open: Ints,
    d_capacity: Ints,  # [workers] KV tokens
    d_reserved: Ints,  # [workers] KV tokens of all requests sent to it
    d_sent: Ints,  # [workers] requests sent to it that are in prefill
    d_batch: Ints,  # [workers] sequences that decode: B
    d_context: Floats,  # [workers]: K
    d_v: Floats,  # [workers]
    d_at_s: Floats,  # [workers]: until when `d_v` is reckoned
    d_end_s: Floats,  # [workers]: end of its next sequence
    heap_v: Floats,  # [workers, max_running]
    heap_request: Ints,  # [workers, max_running]
    counters: Ints,  # [NUM_COUNTERS]
    ttft_histogram: Ints,  # [BUCKETS]
    itl_histogram: Ints,
) -> None:
    workers = len(p_open)
    max_running = heap_v.shape[1]
    n = len(arrival_s)
    while True:
        # 1. Whatever waits and can start, starts.
        while cursor[0] < cursor[1]:
            p = -1
            for w in range(workers):
                if p_open[w] == OPEN and p_busy_s[w] == IDLE:
                    p = w
                    break
            if p < 0:
                break
            request = cursor[0]
            need = prompt[request] + output[request]
            d = -1
            for w in range(workers):
                if (
                    d_open[w] == OPEN
                    and d_batch[w] + d_sent[w] < max_running
                    and d_reserved[w] + need <= d_capacity[w]
                    and (d < 0 or d_reserved[w] < d_reserved[d])
                ):
                    d = w
            if d < 0:
                break
            count = uncached[request]
            pairs = count * (prompt[request] - count + count / 2)
            work_s = max(model[0], model[1] * count + model[2] * pairs)
            p_busy_s[p] = clock_s[0] + work_s
            p_work_s[p] += work_s
            p_request[p] = request
            p_decode[p] = d
            d_reserved[d] += need
            d_sent[d] += 1
            cursor[0] += 1
            counters[STARTED] += 1
        # 2. The next event.
        next_s = until_s
        kind = 0
        at = -1
        if cursor[1] < n and arrival_s[cursor[1]] < next_s:
            next_s = arrival_s[cursor[1]]
            kind = 1
        for w in range(workers):
            if p_busy_s[w] < next_s:
                next_s = p_busy_s[w]
                kind = 2
                at = w
            if d_end_s[w] < next_s:
                next_s = d_end_s[w]
                kind = 3
                at = w
        clock_s[0] = next_s
        if kind == 0:
            return
        if kind == 1:
            cursor[1] += 1
        elif kind == 2:
            request = p_request[at]
            p_busy_s[at] = IDLE
            d = p_decode[at]
            d_sent[d] -= 1
            ttft_s = next_s - arrival_s[request]
            first_s[request] = next_s
            counters[FIRST_TOKENS] += 1
            ttft_histogram[_bucket(ttft_s * 1e3)] += 1
            if ttft_s <= model[6]:
                counters[TTFT_MET] += 1
            _move(d, next_s, model, d_batch, d_context, d_v, d_at_s)
            _push(d, d_batch[d], d_v[d] + output[request] - 1, request, heap_v, heap_request)
            d_batch[d] += 1
            d_context[d] += prompt[request] + 1
            d_end_s[d] = _next_end(d, model, d_batch, d_context, d_v, d_at_s, heap_v)
        else:
            _move(at, next_s, model, d_batch, d_context, d_v, d_at_s)
            request = _pop(at, d_batch[at], heap_v, heap_request)
            d_batch[at] -= 1
            d_context[at] = max(0.0, d_context[at] - prompt[request] - output[request]) if d_batch[at] else 0.0
            d_reserved[at] -= prompt[request] + output[request]
            d_end_s[at] = _next_end(at, model, d_batch, d_context, d_v, d_at_s, heap_v)
            counters[FINISHED] += 1
            counters[OUTPUT_TOKENS] += output[request]
            met = first_s[request] - arrival_s[request] <= model[6]
            if output[request] > 1:
                itl_s = (next_s - first_s[request]) / (output[request] - 1)
                itl_histogram[_bucket(itl_s * 1e3)] += 1
                met = met and itl_s <= model[7]
            if met:
                counters[BOTH_MET] += 1
