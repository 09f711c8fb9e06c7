"""Which KV blocks leave after which prompt chunk: pure bookkeeping of one transfer.

After each chunk the blocks that it filled leave. The first chunk also takes along the blocks of the prefix hit, which
are not computed again; the last chunk takes the partial last block. Blocks that the decode worker has already
(`skip_tokens`) are never pushed.
"""


class PushPlan:
    """Invariant: the ranges that advance() returns follow each other without gap or overlap, and in the end they cover
    the granted blocks."""

    def __init__(self, num_tokens: int, skip_tokens: int, block_size: int, num_window_blocks: int = 0) -> None:
        """num_window_blocks: the last ones, which are granted in layers with a window, too, behind the others."""
        assert skip_tokens % block_size == 0, "a decode worker's cached prefix is whole blocks"
        assert skip_tokens < num_tokens, "the last token's block is never cached"
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._first_granted = skip_tokens // block_size
        self._num_window_blocks = num_window_blocks
        self._next = self._first_granted

    @property
    def num_blocks(self) -> int:
        """How many blocks are granted."""
        return -(-self._num_tokens // self._block_size) - self._first_granted

    def advance(self, end: int) -> range:
        """Blocks of the prompt, counted from 0, to push when the tokens before `end` are computed."""
        complete = -(-end // self._block_size) if end == self._num_tokens else end // self._block_size
        blocks = range(self._next, max(self._next, complete))
        self._next = blocks.stop
        return blocks

    def grant_index(self, block: int) -> int:
        """The index of a block of the prompt in the grant's list of block ids."""
        return block - self._first_granted

    def in_window(self, blocks: range) -> range:
        """Those of the blocks that are granted in layers with a window, too."""
        return range(max(blocks.start, self._first_granted + self.num_blocks - self._num_window_blocks), blocks.stop)

    def window_index(self, block: int) -> int:
        """The index of such a block in the grant's list, for these layers."""
        return self.grant_index(block) + self._num_window_blocks

    def tail(self, end: int) -> int:
        """Used tokens of the last block when the chunk that ends at `end` is the last and leaves it partial, else 0."""
        return end % self._block_size if end == self._num_tokens else 0
