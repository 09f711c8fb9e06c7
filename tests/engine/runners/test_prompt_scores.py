"""Log-probabilities of prompts, in chunks and beside others, against transformers'."""

import random
import warnings
from typing import Any

import pytest
import torch
import transformers

from baton_proto.sampling import PromptLogprobs, SamplingParams
from engine.core.engine import Engine
from engine.model.weights import Weights
from engine.runners import prompt_scores
from engine.runners.torch_runner import build_runner
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from tests.engine.engine_runs import small_engine
from tests.engine.prompt_logprobs import assert_scored
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

BLOCK_SIZE, STEP_TOKENS = 16, 48


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve_model(str(write_tiny_model(tmp_path_factory.mktemp(request.param), architecture=request.param)))


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32).eval()


def make_engine(files: ModelFiles, num_blocks: int = 60) -> Engine:
    config = files.config
    shape = (config.num_layers, num_blocks, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    slab = torch.full(shape, 3.0)
    runner = build_runner(
        files, EngineConfig(device="cpu", attention="torch"), slab, Weights(files.folder, torch.float32)
    )
    return small_engine(files, runner, num_blocks, STEP_TOKENS, 6)


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(length)]


def sequence(name: str, prompt: list[int], num_top: int | None, max_tokens: int = 4, **more: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=num_top)
    return Sequence(name, list(prompt), len(prompt), sampling, **more)


def run(engine: Engine, sequences: list[Sequence]) -> dict[str, list[PromptLogprobs]]:
    """What each sequence was told of its prompt."""
    for one in sequences:
        engine.add(one)
    found: dict[str, list[PromptLogprobs]] = {one.request_id: [] for one in sequences}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            if output.prompt_logprobs is not None:
                assert output.token_ids, "they come with the first token"
                found[output.sequence.request_id].append(output.prompt_logprobs)
        assert engine.check_integrity() == []
    return found


@torch.inference_mode()
def check(reference: Any, told: list[PromptLogprobs], prompt: list[int], num_top: int) -> None:
    (only,) = told
    assert_scored(only, reference(torch.tensor([prompt])).logits[0], prompt, num_top)


@pytest.mark.parametrize("rows_at_once", [7, prompt_scores.ROWS_AT_ONCE])
def test_chunked_prompts_beside_others_are_scored_as_transformers_scores_them(
    files: ModelFiles, reference: Any, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "ROWS_AT_ONCE", rows_at_once)
    asked = {1: 2, 2: 0, 17: 3, 48: 1, 120: 20}
    wanted = {f"{length}": (prompt_of(length, seed=length), num_top) for length, num_top in asked.items()}
    plain = [sequence(f"plain {length}", prompt_of(length, seed=0), None) for length in (20, 70)]
    found = run(make_engine(files), [*plain, *(sequence(name, *one) for name, one in wanted.items())])
    for name, (prompt, num_top) in wanted.items():
        check(reference, found[name], prompt, num_top)
    assert found["plain 20"] == found["plain 70"] == []


def test_what_is_cached_is_computed_again(files: ModelFiles, reference: Any) -> None:
    engine, prompt = make_engine(files), prompt_of(70, seed=1)
    run(engine, [sequence("first", prompt, None)])
    asking, again = sequence("asking", prompt, 1), sequence("again", prompt, None)
    check(reference, run(engine, [asking])["asking"], prompt, 1)
    assert asking.num_cached_tokens == 0
    run(engine, [again])
    assert again.num_cached_tokens == 64


def test_a_preempted_prompt_goes_on_where_it_was(files: ModelFiles, reference: Any) -> None:
    """Seven blocks: the later prompt gives its own up whenever the earlier one decodes on."""
    engine = make_engine(files, num_blocks=7)
    prompts = {"long answer": prompt_of(30, seed=2), "other": prompt_of(33, seed=3)}
    found = run(engine, [sequence(name, prompt, 2, max_tokens=60) for name, prompt in prompts.items()])
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        check(reference, found[name], prompt, 2)


def test_a_replay_and_a_prompt_without_a_successor_are_scored_too(files: ModelFiles, reference: Any) -> None:
    prompt, output = prompt_of(40, seed=4), prompt_of(5, seed=5)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    replay = Sequence("replay", prompt + output, len(prompt), sampling)
    alone = sequence("alone", prompt, 1, prefill_only=True)
    found = run(make_engine(files), [replay, alone])
    check(reference, found["replay"], prompt, 1)
    check(reference, found["alone"], prompt, 1)
