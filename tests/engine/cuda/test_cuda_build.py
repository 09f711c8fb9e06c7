"""How much of a GPU the KV slab takes, in numbers alone."""

import pytest

from engine.cuda.cuda_build import kv_room

GB = 10**9
TOTAL = 100 * GB


@pytest.mark.parametrize(
    ("free", "taken", "gpu_share", "memory_share", "room", "part"),
    [
        (80, 20, 1, 0.97, 75, 75),  # 97 less 20 of weights and 2 of a step
        (80, 20, 1, 0.5, 28, 28),
        (50, 20, 1, 0.5, -2, -2),  # others hold 30, which count
        (80, 20, 2, 0.97, 75, 25),  # half of 94: another process has 3 for itself
        (30, 20, 2, 0.97, 25, 25),
        (20, 20, 2, 0.97, 15, 15),  # the other one has taken more than its half
    ],
)
def test_the_slab_takes_what_is_left_of_the_share_of_the_gpu(
    free: int, taken: int, gpu_share: int, memory_share: float, room: int, part: int
) -> None:
    found = kv_room(TOTAL, free * GB, taken * GB, 2 * GB, gpu_share=gpu_share, memory_share=memory_share)
    assert found == (room * GB, part * GB)
