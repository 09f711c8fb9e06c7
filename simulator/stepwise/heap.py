"""Which sequence of a worker ends next: a heap of numbers, compiled by numba.

An entry is the count of the worker's steps at which a sequence ends, times 2^32, plus the number of its request.
"""

from simulator.compiled import Ints, part


@part
def push(size: int, heap: Ints, entry: int) -> None:
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] <= entry:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = entry


@part
def pop(size: int, heap: Ints) -> int:
    """Takes the least entry; returns its request."""
    top, entry, i = heap[0], heap[size - 1], 0
    while True:
        child = 2 * i + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= entry:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = entry
    return int(top & 0xFFFFFFFF)
