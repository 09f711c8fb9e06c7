import torch

from engine.kernels.embedding import embed
from tests.engine.kernels.device import DEVICE, random
from tests.engine.kernels.references import embed_reference


def test_negative_ids_stand_for_what_the_step_before_sampled() -> None:
    table = random(50, 96)
    sampled = torch.tensor([7, 49, 3], dtype=torch.int32, device=DEVICE)
    token_ids = torch.tensor([0, -1, 12, -3, -2, 49], dtype=torch.int32, device=DEVICE)
    found = embed(token_ids, sampled, table)
    assert torch.equal(found, embed_reference(token_ids, sampled, table))
    assert torch.equal(found, table[[0, 7, 12, 3, 49, 49]])
