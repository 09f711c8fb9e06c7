"""Whole runs of an engine, the same for every runner: what tests compare runners by."""

import random
from collections.abc import Iterator

from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.drafts.drafter import Drafter
from engine.sequences.batch import Runner
from engine.sequences.output import SequenceOutput
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles
from runtime.grammar.compiler import GrammarCompiler
from tests.tiny_model import VOCAB_SIZE

BLOCK_SIZE = 16


def small_engine(
    files: ModelFiles,
    runner: Runner,
    num_blocks: int,
    max_batch_tokens: int,
    max_running: int,
    drafter: Drafter | None = None,
    num_window_blocks: int = 0,
) -> Engine:
    """Its clock stands still, so that what a step computes does not depend on how long steps take."""
    window = files.config.widest_window
    return Engine(
        runner,
        BlockManager(num_blocks, BLOCK_SIZE, window=window, num_window_blocks=num_window_blocks),
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        eos_token_ids=files.eos_token_ids,
        clock=lambda: 0.0,
        drafter=drafter,
    )


def sequences(params: list[SamplingParams], seed: int, grammars: GrammarCompiler | None = None) -> list[Sequence]:
    """`grammars`: for params with a grammar."""
    source = random.Random(seed)
    shared = [source.randrange(3, VOCAB_SIZE) for _ in range(40)]
    result = []
    for index, sampling in enumerate(params):
        own = [source.randrange(3, VOCAB_SIZE) for _ in range(source.randint(1, 50))]
        prompt = shared + own if index % 2 else own
        matcher = grammars.matcher(sampling.grammar) if grammars and sampling.grammar else None
        result.append(Sequence(f"r{index}", prompt, len(prompt), sampling, matcher=matcher))
    return result


def run(engine: Engine, work: list[Sequence]) -> dict[str, list[int]]:
    """Output tokens by request."""
    told: dict[str, list[int]] = {sequence.request_id: [] for sequence in work}
    for output in outputs(engine, work, 400):
        assert output.error is None
        told[output.sequence.request_id] += output.token_ids
    return told


def outputs(engine: Engine, work: list[Sequence], most_steps: int) -> Iterator[SequenceOutput]:
    """A new sequence arrives with every other step."""
    arriving = list(work)
    for step in range(most_steps):
        if arriving and step % 2 == 0:
            engine.add(arriving.pop(0))
        if not arriving and not engine.has_work:
            return
        yield from engine.step().outputs
        assert engine.check_integrity() == []
    raise AssertionError("the engine does not come to an end")
