"""Where a KV block lies in a slab. Both ends of a transfer must agree on this layout, but for the number of blocks."""

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """A slab is one contiguous array `[layers, blocks, kv_heads, 2 (K, V), block_size, head_dim]`.

    Because any head range of one block, K and V together, is one contiguous run, transfers between different
    tensor-parallel sizes are plain runs.

    With `window_layers` it is in two groups: these layers have blocks of their own, fewer than the others. Such a slab
    is no array of that shape, and nothing is transferred from or to it.
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
        num_blocks = self.num_window_blocks if layer in self.window_layers else self.num_blocks
        return (num_blocks, self.num_kv_heads, 2, self.block_size, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head, K and V, of one block in one layer."""
        return 2 * self.block_size * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def nbytes(self) -> int:
        return sum(self.layer_shape(layer)[0] for layer in range(self.num_layers)) * self.block_bytes

    def offset(self, layer: int, block: int, head: int = 0) -> int:
        """First byte of a head of a block in a layer."""
        return layer * self.layer_bytes + block * self.block_bytes + head * self.head_bytes
