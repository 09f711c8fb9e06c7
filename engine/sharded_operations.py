"""Operations of a model that ranks share: what they add to the residual stream is summed over them. The runner's
builder puts it around the operations that it chose."""

from torch import Tensor

from engine.collective import Collective
from engine.operations import Operations


class ShardedOperations:
    """Implements `engine.operations.Operations`. The weights of `add_linear` are divided by columns, the others by rows
    or not at all."""

    def __init__(self, inner: Operations, collective: Collective) -> None:
        self._inner = inner
        self._collective = collective
        self.embed = inner.embed
        self.linear = inner.linear
        self.norm_linear = inner.norm_linear
        self.norm_gated_linear = inner.norm_gated_linear

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        self._collective.add_sum(hidden, self._inner.linear(x, weight))
