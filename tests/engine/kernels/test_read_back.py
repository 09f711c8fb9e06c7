import pytest
import torch

from engine.kernels.read_back import read_back
from tests.engine.kernels.device import DEVICE


@pytest.mark.parametrize("count", [1, 7, 256, 300])
def test_the_host_gets_the_values_and_no_word_behind_them_changes(count: int) -> None:
    values = torch.randint(0, 2**31 - 1, (300,), dtype=torch.int32, device=DEVICE)
    host = torch.full((300,), -1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
    read_back(values[:count], host[:count])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert host[:count].tolist() == values[:count].tolist()
    assert (host[count:] == -1).all()
