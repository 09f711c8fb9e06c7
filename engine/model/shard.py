"""Which part of a model each rank of a tensor-parallel worker holds: pure arithmetic.

Query heads, MLP rows and the head's vocabulary are divided. So are KV heads while there are enough of them; with more
ranks than KV heads, ranks hold copies (kvtransfer/slab/head_plan.py). Norms and the embedding table are whole on every
rank: a step then needs no reduction before its first layer, and a tied head is a view of the table's rows.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.slab import head_plan
from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.model_config import ModelConfig
from runtime.errors import ConfigError

FIELD = "engine.tensor_parallel"
_NOISE_GROUP = 4  # tokens whose noise one counter makes (engine/kernels/philox.py); shares begin at multiples of it


class Part(NamedTuple):
    """The part of a tensor that a rank holds: indices `held` of `dimension`, whose size is `whole`."""

    dimension: int
    whole: int
    held: range

    def uncut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor whose part has `shape`."""
        return (*shape[: self.dimension], self.whole, *shape[self.dimension + 1 :])


@dataclass(frozen=True, slots=True)
class Shard:
    model: ModelConfig  # the whole
    rank: int
    size: int

    @property
    def query_heads(self) -> range:
        return _share(self.model.num_heads, self.rank, self.size)

    @property
    def kv_heads(self) -> range:
        return head_plan.Shard(self.rank, self.size).heads(self.model.num_kv_heads)

    @property
    def mlp_rows(self) -> range:
        return _share(self.model.intermediate_size, self.rank, self.size)

    @property
    def expert_rows(self) -> range:
        """Of each expert's width."""
        return _share(self.model.expert_size, self.rank, self.size)

    @property
    def vocabulary(self) -> range:
        """Token ids whose logits this rank computes. The last rank may have fewer than the others."""
        share = vocabulary_share(self.model.vocab_size, self.size)
        return range(share * self.rank, min(share * (self.rank + 1), self.model.vocab_size))

    @property
    def config(self) -> ModelConfig:
        """The model as the layers of this rank see it."""
        return dataclasses.replace(
            self.model,
            num_heads=len(self.query_heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.mlp_rows),
            expert_size=len(self.expert_rows),
        )

    def part(self, name: str) -> Part | None:
        """The part of the tensor `name`; None: this rank holds it whole."""
        model, head_dim = self.model, self.model.head_dim
        if ".experts." in name:
            return self._expert_part(name)
        match name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]:
            case "q_norm" | "k_norm" if not FAMILIES[model.architecture].has_whole_norms:
                return None
            case "q_proj" | "q_norm":
                return Part(0, model.num_heads * head_dim, _times(self.query_heads, head_dim))
            case "k_proj" | "v_proj" | "k_norm":
                return Part(0, model.num_kv_heads * head_dim, _times(self.kv_heads, head_dim))
            case "o_proj" if not name.endswith(".bias"):
                return Part(1, model.num_heads * head_dim, _times(self.query_heads, head_dim))
            case "gate_proj" | "up_proj":
                return Part(0, model.intermediate_size, self.mlp_rows)
            case "down_proj":
                return Part(1, model.intermediate_size, self.mlp_rows)
            case "lm_head":
                return Part(0, model.vocab_size, self.vocabulary)
            case "sinks":
                return Part(0, model.num_heads, self.query_heads)
        return None

    def _expert_part(self, name: str) -> Part | None:
        """gpt-oss has one tensor for all experts, in which gates and ups take turns."""
        size, rows = self.model.expert_size, self.expert_rows
        match name.removesuffix(".weight").rpartition(".")[2]:
            case "gate_up_proj":
                return Part(2, 2 * size, _times(rows, 2))
            case "gate_up_proj_bias":
                return Part(1, 2 * size, _times(rows, 2))
            case "down_proj_bias":
                return None
            case "down_proj" | "w2":
                return Part(1, size, rows)
        return Part(0, size, rows)


def shard_of(model: ModelConfig, rank: int, size: int) -> Shard:
    """Raises ConfigError when the model cannot be divided among `size` ranks."""
    kv_heads = model.num_kv_heads
    counts = {
        "attention heads": model.num_heads,
        "MLP rows": 0 if model.num_experts else model.intermediate_size,
        "rows of each expert": model.expert_size,
    }
    for what, count in counts.items():
        if count % size:
            raise ConfigError(FIELD, f"{count} {what} of the model cannot be divided by {size}")
    if max(kv_heads, size) % min(kv_heads, size):
        raise ConfigError(FIELD, f"{kv_heads} key-value heads of the model cannot be dealt out to {size} ranks")
    if vocabulary_share(model.vocab_size, size) * (size - 1) >= model.vocab_size:
        raise ConfigError(FIELD, f"{model.vocab_size} tokens of the vocabulary are too few for {size} ranks")
    return Shard(model, rank, size)


def vocabulary_share(vocab_size: int, size: int) -> int:
    """Rows of the head on each rank but the last, which has the rest."""
    return -(-vocab_size // (size * _NOISE_GROUP)) * _NOISE_GROUP if size > 1 else vocab_size


def _share(count: int, rank: int, size: int) -> range:
    share = count // size
    return range(share * rank, share * (rank + 1))


def _times(indices: range, factor: int) -> range:
    return range(indices.start * factor, indices.stop * factor)
