"""Where a KV block lies in a slab. Both ends of a transfer must agree on this layout, but for the number of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True)
class SlabLayout:
    """A slab is one contiguous array `[layers, blocks, kv_heads, 2 (K, V), block_size, head_dim]`.

    Because any head range of one block, K and V together, is one contiguous run, transfers between different
    tensor-parallel sizes are plain runs.

    With `window_layers` it is in two groups, and no such array: these layers have blocks of their own, fewer than the
    others, whose ids begin behind those of the others.
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str  # a key of ITEM_BYTES
    window_layers: frozenset[int] = frozenset()
    num_window_blocks: int = 0  # of each of these

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        assert not self.window_layers
        return (self.num_layers, *self.layer_shape(0))

    def layer_shape(self, layer: int) -> tuple[int, int, int, int, int]:
        return (len(self.layer_blocks(layer)), self.num_kv_heads, 2, self.block_size, self.head_dim)

    def layer_blocks(self, layer: int) -> range:
        """The ids of the layer's blocks."""
        return range(self.num_blocks, self.num_ids) if layer in self.window_layers else range(self.num_blocks)

    @property
    def num_ids(self) -> int:
        return self.num_blocks + self.num_window_blocks

    @property
    def last_layer(self) -> int:
        """The last one that has part in every block of a sequence, where there is one."""
        return max(
            (one for one in range(self.num_layers) if one not in self.window_layers), default=self.num_layers - 1
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of one head, K and V, of one block in one layer."""
        return 2 * self.block_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        """The first byte of each layer, and the one behind the last layer."""
        sizes = (len(self.layer_blocks(layer)) * self.block_bytes for layer in range(self.num_layers))
        return [0, *accumulate(sizes)]

    def offset(self, layer: int, block: int, head: int = 0) -> int:
        """First byte of a head of a block in a layer."""
        start = self._starts[layer] + (block - self.layer_blocks(layer).start) * self.block_bytes
        return start + head * self.head_bytes

    def nbytes_of(self, blocks: Sequence[int]) -> int:
        """Bytes of these blocks, each in all layers that have it."""
        num_sliding = sum(block >= self.num_blocks for block in blocks)
        in_others = (len(blocks) - num_sliding) * (self.num_layers - len(self.window_layers))
        return (num_sliding * len(self.window_layers) + in_others) * self.block_bytes
