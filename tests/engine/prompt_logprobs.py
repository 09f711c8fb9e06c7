"""Whether log-probabilities of a prompt are those that a reference's logits give."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from baton_proto.sampling import PromptLogprobs
from engine.core.engine import Engine
from engine.sequences.sequence import Sequence

NEAR = 1e-3


def assert_scored(found: PromptLogprobs | None, logits: torch.Tensor, prompt: list[int], num_top: int) -> None:
    """Equal but for rounding, which may change the order of tokens that are nearly as probable. logits: float32
    [len(prompt) or more, vocab], row i is of the token after prompt[i]."""
    assert found is not None
    assert found.fits(len(prompt))
    num_rows = len(prompt) - 1
    if num_rows == 0:
        return
    assert found.num_top == num_top
    rows = logits[:num_rows].float().cpu().log_softmax(dim=-1)
    expected = rows.gather(1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    assert np.frombuffer(found.logprobs, "<f4") == pytest.approx(expected[:, 0].numpy(), abs=NEAR)
    ranks = torch.tensor(np.frombuffer(found.ranks, "<u4").astype(np.int64)) - 1
    assert bool(((rows > expected + NEAR).sum(dim=-1) <= ranks).all())
    assert bool(((rows > expected - NEAR).sum(dim=-1) >= ranks).all())
    ids = torch.tensor(np.frombuffer(found.top_ids, "<u4").astype(np.int64)).view(num_rows, num_top)
    assert all(len(set(row)) == num_top for row in ids.tolist())
    values = np.frombuffer(found.top_logprobs, "<f4").reshape(num_rows, num_top)
    assert values == pytest.approx(rows.topk(num_top, dim=-1).values.numpy(), abs=NEAR)
    assert values == pytest.approx(rows.gather(1, ids).numpy(), abs=NEAR)


def assert_engine_scores(folder: Path, engine: Engine, work: list[Sequence]) -> None:
    """Runs all of `work`, and compares what the engine says of the prompts with transformers' model in `folder`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not ours
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for sequence in work:
        engine.add(sequence)
    found: dict[Sequence, PromptLogprobs] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            if output.prompt_logprobs is not None:
                assert output.sequence not in found
                found[output.sequence] = output.prompt_logprobs
    for sequence in work:
        num_top = sequence.sampling.prompt_logprobs
        assert (sequence in found) == (num_top is not None)
        if num_top is not None:
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            with torch.inference_mode():
                logits = reference(torch.tensor([prompt])).logits[0]
            assert_scored(found[sequence], logits, prompt, num_top)
