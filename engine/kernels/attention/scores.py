"""What attention scores have in some families beside the scaled products of queries and keys: a window, a soft cap,
sinks. In a kernel each is a constant, so the plain case costs nothing."""

import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LOWEST: tl.constexpr = tl.constexpr(-1e30)  # below all scores; finite, because rows of a tile may see none of its keys
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@dataclass(frozen=True, slots=True)
class Scores:
    window: int = 0  # as many tokens as one sees, itself included; 0: all before it
    softcap: float = 0.0  # scores are cap * tanh(score / cap); 0: as they are
    sinks: Tensor | None = None  # [heads]: a score that each query has beside those of the keys, of no value

    def factor(self, head_dim: int) -> float:
        """What products are multiplied by before `capped`."""
        plain = math.log2(math.e) / math.sqrt(head_dim)
        return 2 * plain / self.softcap if self.softcap else plain

    def constants(self) -> dict[str, Any]:
        """Of a kernel."""
        return {"WINDOW": self.window, "SOFTCAP": self.softcap, "SINKS": self.sinks is not None}


PLAIN = Scores()


@triton.jit
def capped(products, SOFTCAP: tl.constexpr):
    """Scores to base 2 of products that were multiplied by `Scores.factor`. tanh(x) = 1 - 2 / (1 + exp(2 * x))"""
    if SOFTCAP > 0:
        products = (1.0 - 2.0 / (1.0 + tl.exp2(products))) * (SOFTCAP * LOG2_E)
    return products
