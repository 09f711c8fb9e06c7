"""The KV connector that vLLM loads into its processes. Only this file needs vLLM's classes.

vLLM makes two: one beside its scheduler, which keeps books (books.py), and one in the process that computes, which
talks to the worker process (link.py). What the first has to say travels with vLLM's own step to the second. Leases,
pushes and connections to other workers are the worker process's: it maps the KV cache.
"""

from contextlib import ExitStack
from typing import Any

import torch
from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from engine.vllm.kv.books import SharedRequests, Step
from engine.vllm.kv.cache_memory import OwnMemory
from engine.vllm.kv.link import VllmEnd
from engine.vllm.kv.messages import Arrived, LayerComputed, Refused, StepBegins, Unshared

SOCKET = "socket"  # of kv_connector_extra_config: the path of the worker's end


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, step: Step) -> None:
        self.step = step


class BatonConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._books = SharedRequests()
            return
        self._link = VllmEnd(vllm_config.kv_transfer_config.kv_connector_extra_config[SOCKET])
        self._memory = OwnMemory(sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors), _device())
        self._allocation = ExitStack()
        if not hasattr(
            KVConnectorBase_V1, "get_mem_pool_context"
        ):  # then vLLM allocates between now and the registration
            self._allocation.enter_context(self._memory)
        self._unshared = _unshared(kv_cache_config.kv_cache_groups)
        self._on_gpu = current_platform.is_cuda()
        self._layers: dict[str, int] = {}
        self._next_layer = 0  # of those whose KV is to be told; behind the last one: none
        self._ended: set[str] = set()  # prompts whose blocks are kept
        self._sent: set[str] = set()  # whose blocks nobody reads
        self._bad_blocks: set[int] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """One layer after the other, in each the blocks, in each block the heads, as a slab has them. Older versions
        know it by another name, and on CPUs by none."""
        if hasattr(vllm_config.cache_config, "kv_cache_layout"):
            return "LBHNC"
        return "HND" if current_platform.is_cuda() else None

    # --- beside the scheduler -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._books.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._books.tokens_to_fetch(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._books.allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._books.step(scheduler_output))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return self._books.ended(request), None

    # --- where vLLM computes ------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> OwnMemory:
        """vLLM allocates its KV cache in it."""
        return self._memory

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._allocation.close()
        self._layers = {name: number for number, name in enumerate(kv_caches)}
        context = self._vllm_config.compilation_config.static_forward_context
        kind = context[next(iter(kv_caches))].get_attn_backend().get_name()
        try:
            if self._unshared:
                raise ValueError(self._unshared)
            described = self._memory.described(kv_caches, f"vllm {__version__} {kind} {_inside()}")
        except ValueError as error:
            self._link.send(Unshared(str(error)))  # the worker process ends vLLM, and says why
        else:
            self._link.introduce(described, self._memory.export())

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Before the step."""
        super().bind_connector_metadata(connector_metadata)
        step = connector_metadata.step
        for reserved in step.reserved:
            self._link.send(reserved)
        self._ended.update(step.ended)
        self._next_layer = 0 if step.chunks else len(self._layers)
        if step.chunks or step.lost:
            self._link.send(StepBegins(step.chunks, step.lost))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The worker process has begun already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No step runs on blocks that have not arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any) -> None:
        """On a GPU the layer is only enqueued, and a chunk's layers leave together, as with our own engine, so that
        CUDA graphs of whole steps, which do not come by here, do no harm."""
        if not self._on_gpu:
            self._computed(self._layers[layer_name] + 1)

    def wait_for_save(self) -> None:
        """After the step, which may have computed layers without a word. vLLM keeps the blocks: nothing else waits."""
        if self._next_layer < len(self._layers):
            if self._on_gpu:
                torch.cuda.current_stream().synchronize()
            self._computed(len(self._layers))

    def _computed(self, num_layers: int) -> None:
        for layer in range(self._next_layer, num_layers):
            self._link.send(LayerComputed(layer, ends=layer == len(self._layers) - 1))
            self._next_layer = layer + 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        arrived = set()
        for message in self._link.news():
            if isinstance(message, Arrived):
                arrived.add(message.request_id)
            elif isinstance(message, Refused):
                arrived.add(message.request_id)
                self._bad_blocks.update(message.block_ids)
            else:
                self._sent.add(message.request_id)
        sent = self._sent & self._ended
        self._sent -= sent
        self._ended -= sent
        return sent, arrived

    def get_block_ids_with_load_errors(self) -> set[int]:
        """vLLM asks after get_finished()."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad


def _unshared(groups: list[Any]) -> str:
    """Why the KV of these groups of layers cannot be shared; empty when it can. A request has all blocks of its prompt
    where all layers see the whole prompt: with a sliding window, one block stands in for all that have left it."""
    kinds = [type(group.kv_cache_spec) for group in groups]
    if kinds == [FullAttentionSpec]:
        return ""
    return f"vLLM keeps the KV of this model as {', '.join(kind.__name__ for kind in kinds)}, not as FullAttentionSpec"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if current_platform.is_cuda() else torch.device("cpu")


def _inside() -> str:
    """What a head's bytes depend on beside version and attention: on a CPU they follow what the CPU can do."""
    if current_platform.is_cuda():
        return "cuda"
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()  # as vLLM asks
    return torch.backends.cpu.get_cpu_capability() + " AMX" * has_amx
