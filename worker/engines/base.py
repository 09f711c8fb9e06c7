"""What a worker gets of whatever engine it has: the value that each row of worker/engines/table.py assembles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from baton_proto import transfer
from baton_proto.pooling import GENERATE
from baton_proto.sampling import SamplingParams
from engine.interface import Adapters, Engine, KvEngine, Loop, Memory
from engine.sequences.output import StepOutput
from kvtransfer.prefill_side.sending import KvSender
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import EngineSlab
from kvtransfer.wire.identity import SlabIdentity
from runtime.checkpoint.model_files import ModelFiles
from runtime.code_version import code_version
from runtime.config.serving import ServingConfig, TransferConfig
from runtime.grammar.compiler import GrammarCompiler
from runtime.security.cluster_key import ClusterKey

OnStep = Callable[[StepOutput], None]
MakeLoop = Callable[[OnStep], Loop]
MakeSender = Callable[[SlabIdentity, TransferConfig, ClusterKey | None], KvSender]


@dataclass(frozen=True, slots=True)
class SharedKv:
    """The parts of an engine that sends its KV to other workers, and takes theirs."""

    engine: KvEngine
    slab: EngineSlab  # of rank 0
    make_sender: MakeSender  # for a prefill worker, which closes the sender
    other_slabs: Callable[[], Sequence[AdoptedSlab]] = list  # of ranks 1, 2, ...; a decode worker closes them
    repeats_first: bool = True  # admit() reports the token that came with the KV, if no grammar is broken
    form: str = ""  # what the bytes of a block depend on beside model and sizes, if on anything


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine cannot do, or does in its own way. The defaults are our own engine's."""

    masks: bool = False  # it compiles grammars itself; else sequences have matchers
    sees: bool = False  # it takes prompts with images
    tasks: tuple[str, ...] = (GENERATE,)  # see pooling
    dimension: int = 0  # of its embeddings
    refuses: Callable[[SamplingParams], str] = lambda sampling: ""
    """Why the engine cannot serve a request with these parameters; empty when it can."""
    repeats: Callable[[SamplingParams], bool] = lambda sampling: False
    """Whether the engine computes the answer of a lost worker from its beginning again."""


@dataclass(frozen=True, slots=True)
class EngineAssembly:
    name: str  # of the engine, as operators are told: a row's
    config: ServingConfig
    files: ModelFiles
    engine: Engine
    memory: Memory
    make_loop: MakeLoop
    layout: SlabLayout  # of all KV heads of the model: with one rank the layout of the slab
    max_model_len: int  # prompt and output together
    grammars: GrammarCompiler
    kv: SharedKv | None = None  # None: the engine takes no KV from others and gives none away, but for `passes`
    passes: bool = False  # the engine's own connector takes and gives it: what its requests have to say is passed on
    limits: Limits = Limits()
    close: Callable[[], None] = lambda: None  # after the loop and the transfers have ended
    note: Callable[[], str] = lambda: ""  # event loop: what an operator should know about the engine, for `status`
    adapters: Adapters | None = None  # None: the engine has none
    root: str = ""  # where an engine whose weights nobody here reads says that it has them from
    greedy: str = ""  # what such an engine answers to a fixed prompt; empty: it was not asked
    weights_changed: Callable[[], None] = lambda: None  # engine thread, when `memory` has read others

    @property
    def model(self) -> str:
        """The name that clients use."""
        return self.config.served_model_name or self.files.name

    def lacks(self, adapter: str) -> str:
        """Why a request for the adapter cannot be served; empty when it can, or names none."""
        return "" if not adapter or adapter in self.adapter_names else f"it has no adapter {adapter!r}"

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Event loop."""
        return () if self.adapters is None else tuple(self.adapters.names)

    @property
    def adapter_folders(self) -> tuple[str, ...]:
        return () if self.adapters is None else tuple(map(self.adapters.folder, self.adapter_names))

    @property
    def model_hash(self) -> str:
        """Names configuration and weights; workers whose hashes differ exchange no KV. Another one after an update."""
        return f"{model_hash(self.files, self.memory)}-{self.layout.dtype}"

    @property
    def announced_form(self) -> str:
        """The form of the KV for routers, which pair workers of one form alone: of one version of Baton and of the
        transfer, too. An engine that takes no KV has a form of its own, so that no prompt is computed for it
        elsewhere."""
        form = "passed" if self.passes else "alone" if self.kv is None else self.kv.form
        words = self.layout.dtype, form, f"by {code_version()}, transfer {transfer.MAJOR}"
        return " ".join(filter(None, words))

    def identity(self, worker_id: str, incarnation: int) -> SlabIdentity:
        assert self.kv is not None, "an engine that takes no KV has no peers"
        shard = Shard(0, self.config.engine.tensor_parallel)
        return SlabIdentity(worker_id, incarnation, self.model_hash + self.kv.form, self.layout, shard)


class EngineElsewhere(Protocol):
    """A server that somebody else starts and ends: its workers are there while it is. Used as a context."""

    def life(self) -> AbstractAsyncContextManager[Sequence[EngineAssembly]]:
        """Asks whether the server is there and agrees with the configuration, and watches it in the context: an engine
        for each of its ranks. Raises UnavailableError or ConfigError."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> object: ...


def model_hash(files: ModelFiles, memory: Memory) -> str:
    """Names the model's shape and its weights. Waits until they are hashed."""
    return f"{xxhash.xxh3_64_hexdigest(repr(files.config).encode())}-{memory.fingerprint}"


def grammar_compiler(files: ModelFiles) -> GrammarCompiler:
    return GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)


def pool_layout(files: ModelFiles, num_blocks: int, block_size: int, dtype: str = "") -> SlabLayout:
    """The layout of a pool for all KV heads of the model; `dtype`: where it is not the model's."""
    model = files.config
    return SlabLayout(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        num_kv_heads=model.num_kv_heads,
        block_size=block_size,
        head_dim=model.head_dim,
        dtype=dtype or model.dtype,
    )
