"""A model's engine in this process, as Python's LLM has it: all requests at once."""

from collections.abc import Callable, Sequence as Listed
from itertools import accumulate

from baton.bench.measured import Point, Timing, summed
from baton.bench.workload import Amount, random_ids
from baton_proto.sampling import SamplingParams
from engine.core.engine import Engine
from engine.sequences.sequence import Sequence
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, ModelError
from worker.engines.own import build_engine

Asks = Listed[tuple[list[int], int]]
"""Prompts, each with the number of tokens to answer."""

WARM_STEPS = 8  # full of prompts
WARM_TOKENS = 8  # of an answer


def bench_model(config: ServingConfig, amount: Amount, temperature: float, done: Callable[[], None]) -> Point:
    """`done` is called for each request that has ended. Raises ConfigError, ModelError."""
    asks = random_ids(amount, served_model(config, progress=True).config.vocab_size)
    assembly = build_engine(config)
    try:
        longest = max(len(prompt) + output_tokens for prompt, output_tokens in asks)
        if longest > assembly.max_model_len:
            problem = f"a request has {longest} tokens, and the engine takes {assembly.max_model_len}"
            raise ConfigError("engine.max_model_len", f"{problem}; or give --prompt-tokens and --output-tokens")
        return summed("at once", timed(assembly.engine, asks, temperature, done))
    finally:
        assembly.close()


def timed(engine: Engine, asks: Asks, temperature: float, done: Callable[[], None] = lambda: None) -> list[Timing]:
    """Warms the engine up, and measures. Raises ModelError when a step fails."""
    run_engine(engine, _warm_up(asks, engine.scheduler.max_batch_tokens), temperature)
    return run_engine(engine, asks, temperature, done)


def _warm_up(asks: Asks, max_tokens: int) -> Asks:
    """Some full steps of prompts and some of decodes, which compile kernels and choose matrix products."""
    totals = accumulate(len(prompt) for prompt, _ in asks)
    fitting = [prompt for (prompt, _), total in zip(asks, totals, strict=True) if total <= WARM_STEPS * max_tokens]
    return [(prompt, WARM_TOKENS) for prompt in fitting or [asks[0][0]]]


def run_engine(engine: Engine, asks: Asks, temperature: float, done: Callable[[], None] = lambda: None) -> list[Timing]:
    """The time of all requests begins before the first one is given to the engine. Raises ModelError when a step
    fails."""
    sequences = [
        Sequence(str(number), list(prompt), len(prompt), SamplingParams(tokens, number, temperature, ignore_eos=True))
        for number, (prompt, tokens) in enumerate(asks)
    ]
    steps: list[tuple[float, list[str], list[int]]] = []  # its end, whose tokens, how many: read after the last step
    began_s = engine.clock()
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        outputs = engine.step().outputs
        names, counts = (
            [output.sequence.request_id for output in outputs],
            [len(output.token_ids) for output in outputs],
        )
        steps.append((engine.clock(), names, counts))
        for output in outputs:
            if output.finish == "error":
                raise ModelError("bench", output.error or "an engine step failed")
            if output.finish is not None:
                done()
    engine.forget_cache(keep=False)
    timings = {sequence.request_id: Timing(began_s, prompt_tokens=sequence.num_prompt_tokens) for sequence in sequences}
    for now_s, names, counts in steps:
        for name, count in zip(names, counts, strict=True):
            timing = timings[name]
            timing.tokens_s += [now_s] * count
            timing.output_tokens += count
            timing.ended_s = now_s
    return list(timings.values())
