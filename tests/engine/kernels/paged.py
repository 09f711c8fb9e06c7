"""A paged cache whose unused slots hold NaN, and sequences scattered over it."""

import torch
from torch import Tensor

from tests.engine.kernels.device import DEVICE, random


class PagedCache:
    def __init__(
        self, lengths: list[int], kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, *, spare: int = 3
    ) -> None:
        counts = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(counts) + spare).tolist()
        self.tables: list[list[int]] = []
        shape = (len(order), kv_heads, 2, block_size, head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
        for length, count in zip(lengths, counts, strict=True):
            table = [order.pop() for _ in range(count)]
            self.tables.append(table)
            for index, block in enumerate(table):
                used = min(block_size, length - index * block_size)
                self.cache[block, :, :, :used] = random(kv_heads, 2, used, head_dim, dtype=dtype)

    def flat_tables(self) -> tuple[Tensor, Tensor]:
        """(block ids of all sequences, where each one begins)"""
        starts = torch.tensor([0, *[len(table) for table in self.tables]]).cumsum(0)[:-1]
        flat = torch.tensor([block for table in self.tables for block in table], dtype=torch.int32)
        return flat.to(DEVICE), starts.to(DEVICE, torch.int32)
