"""The engine in the caller's own process, without a service: the same engine, tokenizer, sampling and stop strings."""

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from baton.in_process.answers import CLOSED, Answers, Output
from baton.in_process.progress_bar import progress_bar
from baton.in_process.prompt_reader import Messages, Params, PromptReader, Prompts
from baton.in_process.sampling_params import SamplingParams
from baton.service.wanted.machine_defaults import ALONE, suited
from baton_proto.worker import TAGS
from engine.core.engine import Engine
from engine.interface import LEVELS
from engine.loading.model_memory import Tensors
from kvtransfer.slab.slab import Slab
from router.api.wishes.sampling_options import model_defaults
from router.parsing.families import MARKS
from router.requests.request import GenerateRequest
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, InvalidRequestError, RankLostError, UnavailableError
from runtime.telemetry.logging import quieten_logging
from worker.engines.own import OwnAssembly, build_engine

if TYPE_CHECKING:
    import torch

__all__ = ["LLM", "Output", "SamplingParams"]


class LLM:
    """Any thread may call it; the prompts of several calls run in common batches. Errors are those of
    runtime/errors.py: what is wrong with a prompt or a parameter is an InvalidRequestError."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """`model`: what `baton up --model` takes. `settings`: keys of serving.yaml's section `engine`, such as
        tensor_parallel=2 or kv_memory="8GiB". Raises ConfigError or ModelError."""
        quieten_logging()
        if settings.get("tensor_parallel", 1) != 1 and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "tensor_parallel", "its processes end with the thread that starts them: use the main thread"
            )
        config = with_overrides(ServingConfig(), {"model": str(model), "engine": settings} | ALONE, "LLM")
        files = served_model(config, progress=sys.stderr.isatty())
        config = suited(config, {"engine": settings}, files, gpu=_on_gpu(config))
        self._config = config.engine
        self.tokenizer = Tokenizer(files.folder, files.config.vocab_size, MARKS)
        answers: Answers | None = None

        def lost(error: RankLostError) -> None:
            if answers is not None:  # else loading raises it
                answers.fail(error)

        assembly = build_engine(config, lost)
        answers = Answers(assembly, self.tokenizer)
        self._close = weakref.finalize(self, _close, answers, assembly)  # at the end of the program, if not before
        self._open: Answers | None = answers
        slab = assembly.slab
        if slab.driver.kind == "cuda":
            answers.call_idle(lambda _: _use_device_of(slab))
        way_out = _way_out(config, files, assembly.max_model_len)
        salt, defaults = config.engine.cache_salt or "", model_defaults(files.folder)
        self._reader = PromptReader(self.tokenizer, assembly.max_model_len, way_out, salt, defaults, assembly.grammars)

    def generate(self, prompts: Prompts, params: Params = None, *, progress: bool = True) -> list[Output]:
        """The answer to each prompt, a text or token ids, in their order. Of one `params` for all prompts, prompt i
        draws with seed + i; of a list, each prompt has its own; None: as the model's generation_config.json says. The
        progress bar is for terminals."""
        return self._whole(self._reader.prompts(prompts, params), progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[Output]:
        """Answers one conversation or several like generate(), through the model's chat template."""
        return self._whole(self._reader.chats(messages, params, chat_template_kwargs), progress)

    def stream(self, prompts: Prompts | Messages, params: Params = None) -> Iterator[Output]:
        """The answers of `generate`, or of `chat` to one conversation, as they come: what is new, and `index` says of
        which prompt. Closing the iterator ends the rest."""
        if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Mapping):
            return self._answers.run(self._reader.chats(cast(Messages, prompts), params, None))
        return self._answers.run(self._reader.prompts(cast(Prompts, prompts), params))

    def sleep(self, level: int = 1) -> int:
        """Gives the GPU's memory back, and returns the bytes that came free. Level 1 keeps the weights in host memory,
        level 2 reads them again; see docs/operating.md. Raises UnavailableError while prompts are being answered."""
        if level not in LEVELS:
            raise InvalidRequestError("level", f"{level} is none of {', '.join(map(str, LEVELS))}")

        memory = self._answers.memory

        def fall_asleep(engine: Engine) -> int:
            if not memory.asleep:
                engine.forget_cache(keep=level == 1)
            return memory.sleep(level)

        return self._answers.call_idle(fall_asleep)

    def wake(self, tags: Sequence[str] = TAGS) -> None:
        """Takes the memory of these tags again. Raises UnavailableError when there is not enough, and ModelError when
        the weights on disk are others now."""
        if strange := [tag for tag in tags if tag not in TAGS]:
            raise InvalidRequestError("tags", f"{strange[0]!r} is none of {', '.join(TAGS)}")
        memory = self._answers.memory
        self._answers.call_idle(lambda _: memory.wake(tuple(tags)))

    def update_weights(self, tensors: "Tensors | Mapping[str, torch.Tensor]") -> None:
        """Replaces all weights in place by whole torch tensors, given as (name, tensor) under the checkpoint's names:
        what `named_parameters()` or `state_dict()` of the model in transformers gives, on any device. A tensor may be
        gone when the next one is asked for. Cached prefixes are forgotten.

        Raises InvalidRequestError for what cannot be pairs, UnavailableError while prompts are being answered or the
        weights sleep, and ModelError that names the tensor that is unknown, does not fit or is missing; then nothing is
        answered until an update succeeds, unless nothing was replaced.
        """
        if self._config.disk_kv.folder is not None:
            problem = "its files are named by the weights that were loaded: leave it out where weights are updated"
            raise ConfigError("disk_kv", problem)
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
            raise InvalidRequestError("tensors", f"must be pairs (name, tensor), not {type(tensors).__name__}")
        answers = self._answers
        with answers.held(lambda engine: engine.forget_cache(keep=False), "the weights are being updated"):
            answers.memory.update(pairs)

    def close(self) -> None:
        """Ends the engine and its processes, and gives the memory back. Idempotent."""
        self._close()
        self._open = None
        gc.collect()  # tensors go with the engine, which is full of circles
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _whole(self, requests: list[GenerateRequest], progress: bool) -> list[Output]:
        wholes = [Output("", [], index=index) for index in range(len(requests))]
        engine = self._answers.engine
        done = num_tokens = 0
        prompt_tokens_before = engine.num_prompt_tokens
        with (
            progress_bar(len(requests), progress and sys.stderr.isatty()) as report,
            contextlib.closing(self._answers.run(requests)) as deltas,
        ):
            for delta in deltas:
                wholes[delta.index].add(delta)
                num_tokens += len(delta.token_ids)
                done += delta.finish_reason is not None
                report(done, engine.num_prompt_tokens - prompt_tokens_before, num_tokens)
        return wholes

    @property
    def _answers(self) -> Answers:
        if self._open is None:
            raise UnavailableError(CLOSED)
        return self._open


def _on_gpu(config: ServingConfig) -> bool:
    from engine.runners.auto import resolve_device  # late, because it imports torch

    return resolve_device(config.engine).type == "cuda"


def _use_device_of(slab: Slab) -> None:
    """The engine's thread begins with the first GPU, and its maker may be on another one."""
    import torch

    torch.cuda.set_device(slab.flat.device)


def _close(answers: Answers, assembly: OwnAssembly) -> None:
    answers.close()
    assembly.close()


def _way_out(config: ServingConfig, files: ModelFiles, max_model_len: int) -> str:
    if max_model_len == files.max_position:
        return ""
    setting = "max_model_len" if max_model_len == config.engine.max_model_len else "kv_memory"
    return f" here; LLM(..., {setting}=...) allows up to {files.max_position}"
