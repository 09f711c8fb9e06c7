import pytest
import torch

from engine.kernels.copy_words import copy_words
from tests.engine.kernels.device import DEVICE

IS_CUDA = DEVICE.type == "cuda"


@pytest.mark.parametrize("count", [1, 7, 1024, 1300])
def test_the_words_arrive_in_both_directions_and_none_behind_them_changes(count: int) -> None:
    words = torch.randint(0, 2**31 - 1, (1400,), dtype=torch.int32).pin_memory() if IS_CUDA else torch.arange(1400)
    words = words.to(torch.int32)
    device = torch.full((1400,), -1, dtype=torch.int32, device=DEVICE)
    back = torch.full((1400,), -2, dtype=torch.int32, pin_memory=IS_CUDA)
    copy_words(words[:count], device[:count])
    copy_words(device[:count], back[:count])
    if IS_CUDA:
        torch.cuda.synchronize()
    assert device.tolist() == words[:count].tolist() + [-1] * (1400 - count)
    assert back.tolist() == words[:count].tolist() + [-2] * (1400 - count)
