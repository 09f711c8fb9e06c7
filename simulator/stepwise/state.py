"""The arrays that the stepwise simulation works on, and the lists of requests in them."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import BUCKETS, Floats, Ints, part
from simulator.requests import NOBODY, Requests
from simulator.stepwise.winner_tree import Trees, change, new_trees

Worker = Any  # one element of State.workers

PREFILLS, DECODES = range(2)  # kinds of workers
# Lists: prompts that the next steps choose from, those that came behind them, those that wait for room on their decode
# worker, and those whose KV is on its way.
PROMPTS, COME, ROOMLESS, COMING = range(4)
STEP_END = 0  # trees: when a worker's step ends. The others follow for each kind of workers:
IDLE, NEAR, FAR, LEAST = range(1, 5)  # see placing.py
TREES = 9

# Records instead of columns, because each worker and each request then costs few cache lines.
WORKER = np.dtype(
    [
        ("began_s", "f8"),  # when the present step or run began
        ("context", "f8"),  # tokens of the sequences that decode: K
        ("charged", "f8"),  # tokens of all requests that decode here, prompts that are still to come included
        ("queue_pairs", "f8"),
        ("queue_s", "f8"),  # the time from which on the queue takes what the formula says
        ("free_s", "f8"),  # when the queue is done by the formula; 0 without one
        ("steps_s", "f8"),  # what its decode steps cost a request, by the router
        ("queue_tokens", "i8"),  # of prompts that are to run here
        ("reserved", "i8"),  # KV tokens of the requests that have their memory
        ("taken", "i4"),  # number of these requests
        ("kind", "i4"),  # PREFILLS or DECODES
        ("run", "i4"),  # steps until the end of the present step or run; 0: there is none
        ("chunks", "i4"),  # of the present step
        ("ranked", "i4"),  # prompts in PROMPTS that are not begun
        ("batch", "i4"),  # sequences that decode: B
        ("steps", "i4"),  # done since the start
        ("requests", "i4"),  # that the router has sent to decode here
        ("first", "i4", 4),  # of each list
        ("last", "i4", 4),
    ],
    align=True,
)
REQUEST = np.dtype(
    [
        ("arrival_s", "f8"),
        ("first_s", "f8"),  # when the first token came or, while the KV is on its way, will come
        ("end_s", "f8"),  # when the last one came
        ("rank_s", "f8"),  # the lowest goes first
        ("prompt", "i4"),  # tokens
        ("left", "i4"),  # of these, still to be computed; until it arrives, `uncached` of Requests
        ("output", "i4"),  # tokens
        ("follower", "i4"),  # the next one in its list
        ("runs_on", "i4"),  # the worker that runs the prompt
        ("decodes_on", "i4"),
        ("chunk", "i4"),  # tokens of the prompt in the present step
        ("begun", "i4"),  # whether it has its memory: a cache line in all
    ]
)


class Fleet(NamedTuple):
    """What does not change. Rows: PREFILLS, DECODES."""

    times: Floats  # [2, 6] as in StepTimes, in seconds
    kv_tokens: Ints  # [2] of a worker
    max_running: Ints  # [2]
    max_batch_tokens: Ints  # [2]
    ahead: Ints  # [2] steps that have been submitted when one runs
    workers: Ints  # [2] how many there are; those that prefill come first
    ttft_s: float  # the targets
    itl_s: float
    decode_steps: float  # this and the rest as in PlacementConfig, in seconds
    ship_s: float
    ship_token_s: float
    delay_weight: float
    crowd_weight: float
    local_prefill_tokens: int
    keep_steps: float


class State(NamedTuple):
    workers: NDArray[np.void]  # [workers] of WORKER
    requests: NDArray[np.void]  # [requests] of REQUEST
    trees: Trees  # [TREES, nodes]
    ends: Ints  # [workers, max_running] heap of count of steps * 2^32 + the request that ends then
    events: Ints  # [1] how many there were
    gaps: Ints  # [BUCKETS] histogram of the times between two tokens of a request
    backlog: Floats  # [2, 2] per kind: the sum of free_s over workers with a queue, and their number
    elsewhere: Ints  # [requests] this and `holder` as in Requests; columns, because only an arrival reads them
    holder: Ints


def new_state(fleet: Fleet, given: Requests) -> State:
    workers = np.zeros(fleet.workers.sum(), WORKER)
    workers["kind"] = np.repeat([PREFILLS, DECODES], fleet.workers)
    workers["first"] = workers["last"] = NOBODY
    trees = new_trees(TREES, len(workers))
    for worker, kind in enumerate(workers["kind"].tolist()):
        for tree in (IDLE, LEAST):  # nobody has a queue, nobody decodes
            change(4 * kind + tree, worker, 0.0, trees)
    requests = np.zeros(len(given.arrival_s), REQUEST)
    requests["arrival_s"], requests["prompt"] = given.arrival_s, given.prompt
    requests["left"], requests["output"] = given.uncached, given.output
    return State(
        workers,
        requests,
        trees,
        ends=np.zeros((len(workers), fleet.max_running.max()), np.int64),
        events=np.zeros(1, np.int64),
        gaps=np.zeros(BUCKETS, np.int64),
        backlog=np.zeros((2, 2)),
        elsewhere=given.elsewhere,
        holder=given.holder,
    )


@part
def append(worker: Worker, which: int, request: int, state: State) -> None:
    state.requests[request].follower = NOBODY
    if worker.last[which] == NOBODY:
        worker.first[which] = request
    else:
        state.requests[worker.last[which]].follower = request
    worker.last[which] = request


@part
def take_out(worker: Worker, which: int, request: int, before: int, state: State) -> None:
    """`before`: the request before it in the list; NOBODY: it is the first."""
    after = state.requests[request].follower
    if before == NOBODY:
        worker.first[which] = after
    else:
        state.requests[before].follower = after
    if after == NOBODY:
        worker.last[which] = before
