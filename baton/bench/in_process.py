"""A model's engine in this process, as a worker has it: all requests at once."""

from collections.abc import Callable, Sequence as Listed
from itertools import accumulate

from baton.bench.measured import Point, Timing, summed
from baton.bench.workload import Amount, random_ids
from baton_proto.sampling import SamplingParams
from engine.core.engine import Engine
from engine.core.sequence import Sequence
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, ModelError
from worker.assembly import build_engine

WARM_TOKENS = 8


def bench_model(config: ServingConfig, amount: Amount, temperature: float, done: Callable[[], None]) -> Point:
    """`done` is called for each request that has ended. Raises ConfigError, ModelError."""
    asks = random_ids(amount, served_model(config, progress=True).config.vocab_size)
    assembly = build_engine(config)
    try:
        longest = max(len(prompt) + output_tokens for prompt, output_tokens in asks)
        if longest > assembly.max_model_len:
            problem = f"a request has {longest} tokens, and the engine takes {assembly.max_model_len}"
            raise ConfigError("engine.max_model_len", f"{problem}; or give --prompt-tokens and --output-tokens")
        engine = assembly.engine
        run_engine(engine, _warm_up(asks, engine.scheduler.max_batch_tokens), temperature, lambda: None)
        return summed("at once", run_engine(engine, asks, temperature, done))
    finally:
        assembly.close()


def _warm_up(asks: Listed[tuple[list[int], int]], max_tokens: int) -> list[tuple[list[int], int]]:
    """A step full of prompts and some decodes, which compile kernels and choose matrix products."""
    totals = accumulate(len(prompt) for prompt, _ in asks)
    fitting = [prompt for (prompt, _), total in zip(asks, totals, strict=True) if total <= max_tokens]
    return [(prompt, WARM_TOKENS) for prompt in fitting or [asks[0][0]]]


def run_engine(
    engine: Engine, asks: Listed[tuple[list[int], int]], temperature: float, done: Callable[[], None]
) -> list[Timing]:
    """`asks`: (prompt, output tokens) each. Raises ModelError when a step fails."""
    timings: dict[str, Timing] = {}
    for number, (prompt, output_tokens) in enumerate(asks):
        sampling = SamplingParams(output_tokens, number, temperature, ignore_eos=True)
        timings[str(number)] = Timing(engine.clock(), prompt_tokens=len(prompt))
        engine.add(Sequence(str(number), list(prompt), len(prompt), sampling))
    while engine.has_work:
        outputs = engine.step().outputs
        now_s = engine.clock()
        for output in outputs:
            if output.finish == "error":
                raise ModelError("bench", output.error or "an engine step failed")
            timing = timings[output.sequence.request_id]
            timing.tokens_s += [now_s] * len(output.token_ids)
            timing.output_tokens += len(output.token_ids)
            if output.finish is not None:
                timing.ended_s = now_s
                done()
    engine.clear_cache()
    engine.block_manager.take_events()
    return list(timings.values())
