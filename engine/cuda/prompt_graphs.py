"""CUDA graphs of a model's work between one attention and the next, for steps with prompts.

Such a step cannot be one graph, because attention is launched for the exact lengths of its prompts. The other launches,
which are most, depend on the number of tokens alone, and are padded to the next of some sizes. The graphs save host
time in steps with short prompts, or with prompts beside many decodes. Steps that keep the GPU busy for far longer than
the host needs to launch them have no graphs, because padding would only cost time.
"""

from bisect import bisect_left
from collections.abc import Callable

from torch import Tensor

from engine.model.families.llama import Attend, Llama
from runtime.checkpoint.model_config import ModelConfig

# Weights times tokens that an H200 multiplies (600 TFLOP/s) in 1.44 ms. A layer's launches take the host 0.36 ms, and a
# multiple beside a worker's other threads, because each launch gives the interpreter's lock away and waits for it.
LAUNCH_PRODUCTS = 432e9
LARGEST = 4096  # tokens, however small the model: graphs and their buffers take memory

Record = Callable[[Callable[[], None]], Callable[[], None]]


def prompt_sizes(max_tokens: int, weights: int) -> list[int]:
    """16, 32, 48, 64, 96, 128, 192, ...: from 64 on at most a third is padding, from 256 on a fifth. From 512 to 2048
    each multiple of 128 is a size, the rows of a matrix product's tile. The last size of an 8B model, whose layers have
    193 million weights each, is 2048. `weights`: of a layer."""
    sizes = [16, 32, 48, 64, 96, 128, 192, *range(256, 512, 64), *range(512, 2048, 128), *range(2048, LARGEST + 1, 512)]
    sizes = [size for size in sizes if size == sizes[0] or size * weights <= LAUNCH_PRODUCTS]
    return sizes if sizes[-1] <= max_tokens else [*(size for size in sizes if size < max_tokens), max_tokens]


def layer_weights(config: ModelConfig) -> int:
    """Number of weights of a layer's matrix products, of which each token has its part."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # of queries and of the output; of keys and values
    width = config.experts_per_token * config.expert_size if config.num_experts else config.intermediate_size
    return config.hidden_size * (heads * config.head_dim + 3 * width)


class PromptGraphs:
    """Rows beyond a step's tokens hold arbitrary values. Invariant: between attentions no row depends on another."""

    def __init__(self, model: Llama, max_tokens: int, record: Record) -> None:
        """`record`: as `engine.cuda.graph_recorder.GraphRecorder.record`."""
        config, like = model.config, model.embeddings
        self.sizes = prompt_sizes(max_tokens, layer_weights(config))
        self._model = model
        self._hidden = like.new_zeros(self.sizes[-1], config.hidden_size)
        self._qkv = like.new_zeros(self.sizes[-1], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        self._mixed = like.new_zeros(self.sizes[-1], config.num_heads, config.head_dim)
        self._pieces: dict[int, list[Callable[[], None]]] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._piece(size, min(1, config.num_layers))  # loads what all have
            self._pieces[size] = [record(self._piece_of(size, index)) for index in range(config.num_layers + 1)]

    def has_room(self, num_tokens: int) -> bool:
        return num_tokens <= self.sizes[-1]

    def mixed(self, num_tokens: int) -> Tensor:
        """[num_tokens, heads, head_dim]: the memory for attention's results."""
        return self._mixed[:num_tokens]

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """Computes the model's `forward` for a number of tokens that `has_room` allows. The next call overwrites the
        result."""
        model, num_tokens = self._model, len(token_ids)
        hidden, qkv = self._hidden[:num_tokens], self._qkv[:num_tokens]
        hidden.copy_(model.embed(token_ids))
        *pieces, last = self._pieces[self.sizes[bisect_left(self.sizes, num_tokens)]]
        for layer, piece in zip(model.layers, pieces, strict=True):
            piece()
            attend(layer.index, qkv, layer.head_norms)
        last()
        return hidden

    def _piece_of(self, size: int, index: int) -> Callable[[], None]:
        return lambda: self._piece(size, index)

    def _piece(self, size: int, index: int) -> None:
        """The work between the attentions of layers `index - 1` and `index`."""
        layers, hidden = self._model.layers, self._hidden[:size]
        if index > 0:
            layers[index - 1].after_attention(hidden, self._mixed[:size].flatten(1))
        if index < len(layers):
            layers[index].before_attention(hidden, self._qkv[:size].flatten(1))
        else:
            self._model.operations.settle(hidden)


def without_graphs(work: Callable[[], None]) -> Callable[[], None]:
    """A `Record` for devices without CUDA graphs."""
    return work
