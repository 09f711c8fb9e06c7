"""The engine in one's own process answers what the service answers, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import torch

from baton import LLM, Output, SamplingParams
from baton.in_process.progress_bar import progress_bar
from baton_proto.sampling import PARAMETERS
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import resolve_model
from runtime.errors import ConfigError, ContextLengthError, InvalidRequestError, RankLostError, UnavailableError
from tests.service import NEEDS_TWO, ON_DEVICE, assert_gone, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import random_prompt
from tests.tiny_model import EOS_TOKEN_IDS, TEXT, VOCAB_SIZE, write_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = ON_DEVICE | {"kv_memory": "16MiB", "block_size": 16}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who runs first?"}]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3, "max_tokens": 20}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **SMALL) as llm:
        yield llm


def long_greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **more)


@pytest.mark.timeout(300)
def test_greedy_answers_of_smollm2_equal_those_of_transformers() -> None:
    files = resolve_model("smollm2")
    text = Tokenizer(files.folder, files.config.vocab_size).encode(TEXT * 2, add_special_tokens=False).tolist()
    prompts = [text[start : start + length] for start, length in enumerate((1, 16, 33, 200))]
    oracle = Oracle(files.folder)
    with LLM("smollm2", **SMALL | {"kv_memory": "128MiB"}) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.greedy(prompt, 8, guess=answer.token_ids)


async def test_answers_equal_those_of_a_service_with_the_same_seed(tiny_model: Path, llm: LLM) -> None:
    prompt = "A relay race is won by the team"
    options = SAMPLED | {"seed": 7, "stop": ["e "], "min_tokens": 3}
    async with (
        running_service(tiny_model, 1, 1) as service,
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
    ):
        answer = await http.post("/v1/completions", json=options | {"prompt": prompt, "logprobs": 2, "n": 3})
        choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
        chat = await http.post("/v1/chat/completions", json=options | {"messages": CHAT})
        message = chat.json()["choices"][0]
    ours = llm.generate([prompt] * 3, SamplingParams(**options, logprobs=2))
    assert [(one.text, one.finish_reason) for one in ours] == [(c["text"], c["finish_reason"]) for c in choices]
    for one, choice in zip(ours, choices, strict=True):
        assert [each.logprob for each in one.logprobs] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert len(one.logprobs) == len(one.token_ids)
        assert all(len(each.top) == 2 for each in one.logprobs)
    (answered,) = llm.chat(CHAT, SamplingParams(**options))
    assert (answered.text, answered.finish_reason) == (message["message"]["content"], message["finish_reason"])


def test_prompts_that_share_a_seed_draw_their_own_noise(llm: LLM) -> None:
    prompt = random_prompt(20, seed=1)
    together = llm.generate([prompt] * 4, SamplingParams(**SAMPLED, seed=5))
    assert len({tuple(one.token_ids) for one in together}) == 4
    alone = [llm.generate([prompt], SamplingParams(**SAMPLED, seed=5 + i))[0] for i in range(4)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    unseeded = llm.generate([prompt] * 4, SamplingParams(**SAMPLED))
    assert len({tuple(one.token_ids) for one in unseeded}) == 4


def test_each_prompt_may_have_params_of_its_own(llm: LLM) -> None:
    prompts = [random_prompt(9, seed=2), random_prompt(30, seed=3)]
    params = [SamplingParams(**SAMPLED, seed=1), long_greedy()]
    assert [one.token_ids for one in llm.generate(prompts, params)] == [
        llm.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)
    ]
    with pytest.raises(InvalidRequestError, match="params: has 2 entries for 1 prompts"):
        llm.generate("a", params)


def test_a_stop_string_ends_the_text_before_it_and_the_sequence_with_it(llm: LLM) -> None:
    whole = llm.generate("It is", long_greedy())[0]
    stop = whole.text[10:13]
    stopped = llm.generate("It is", long_greedy(stop=stop))[0]
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    ended = llm.generate("It is", SamplingParams(logit_bias={EOS_TOKEN_IDS[0]: 100.0}))[0]
    assert (ended.text, ended.token_ids, ended.finish_reason) == ("", [EOS_TOKEN_IDS[0]], "stop")


def test_a_prompts_tokens_have_log_probabilities(llm: LLM) -> None:
    prompts = [random_prompt(50, seed=12), random_prompt(1, seed=13)]
    scored, alone = llm.generate(prompts, SamplingParams(max_tokens=2, prompt_logprobs=2))
    assert (len(scored.prompt_logprobs), alone.prompt_logprobs) == (49, [])
    assert all(len(each.top) == 2 for each in scored.prompt_logprobs)
    *before, last = prompts[0]
    forced = SamplingParams(max_tokens=1, logprobs=2, logit_bias={last: 100.0})
    (sampled,) = llm.generate([before], forced)
    assert sampled.token_ids == [last]
    assert sampled.logprobs[0].logprob == pytest.approx(scored.prompt_logprobs[-1].logprob, abs=1e-4)


def test_a_prompt_that_came_before_is_cached(llm: LLM) -> None:
    prompt = random_prompt(100, seed=11)
    params = SamplingParams(max_tokens=1)
    assert [llm.generate([prompt], params)[0].cached_tokens for _ in range(2)] == [0, 96]


def test_what_a_stream_gives_adds_up_to_the_answers(llm: LLM) -> None:
    prompts, params = ["Übung macht", "People who work together", "It"], long_greedy(logprobs=1)
    wholes = [Output("", [], index=i) for i in range(3)]
    seen = []
    for delta in llm.stream(prompts, params):
        wholes[delta.index].add(delta)
        seen.append(delta.index)
    cached = [one.cached_tokens for one in wholes]
    again = llm.generate(prompts, params)
    assert wholes == [msgspec.structs.replace(one, cached_tokens=was) for one, was in zip(again, cached, strict=True)]
    assert sorted(seen[:3]) == sorted(seen[3:6]) == [0, 1, 2], "answers come beside each other"
    assert "".join(delta.text for delta in llm.stream(CHAT, long_greedy())) == llm.chat(CHAT, long_greedy())[0].text


def test_conversations_are_answered_beside_each_other(llm: LLM) -> None:
    other = [{"role": "user", "content": [{"type": "text", "text": "What is lost?"}]}]
    both = llm.chat([CHAT, other], long_greedy())
    assert [one.text for one in both] == [llm.chat(each, long_greedy())[0].text for each in (CHAT, other)]


def test_threads_share_the_engine(llm: LLM) -> None:
    answers: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        answers[seed] = llm.generate([random_prompt(30, seed)], long_greedy())[0].token_ids

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert answers[seed] == llm.generate([random_prompt(30, seed)], long_greedy())[0].token_ids


@pytest.mark.parametrize("level", [1, 2])
def test_a_model_that_was_asleep_answers_as_before(llm: LLM, level: int) -> None:
    before = llm.generate("It is", long_greedy())
    assert llm.sleep(level) > 0
    assert llm.sleep(level) == 0
    with pytest.raises(UnavailableError, match=r"the model sleeps \(weights, kv_cache\); wake\(\) it first"):
        llm.generate("It is")
    llm.wake(["weights"])
    with pytest.raises(UnavailableError, match=r"\(kv_cache\)"):
        llm.generate("It is")
    llm.wake()
    assert llm.generate("It is", long_greedy())[0].token_ids == before[0].token_ids


def test_a_model_does_not_fall_asleep_while_it_answers(llm: LLM) -> None:
    stream = llm.stream(["It is", "He was"], SamplingParams(max_tokens=2000, ignore_eos=True))
    next(stream)
    with pytest.raises(UnavailableError, match="prompts are being answered"):
        llm.sleep()
    stream.close()  # type: ignore[attr-defined]
    llm.sleep()
    llm.wake()


def test_what_is_wrong_is_named_with_its_limit(tiny_model: Path, llm: LLM) -> None:
    def refused(*arguments: Any, **more: Any) -> str:
        with pytest.raises(InvalidRequestError) as refusal:
            llm.generate(*arguments, **more)
        return str(refusal.value)

    assert refused(["a", [1] * 4096]).endswith("4096 tokens, with at least one to generate; the model takes 4096")
    assert refused(["a", [1, VOCAB_SIZE]]) == f"prompts[1]: token id {VOCAB_SIZE} is not in the vocabulary, 0 to 511"
    assert refused([[]]) == "prompts[0]: is empty; at least one token is needed"
    assert refused("") == "prompts: is empty; at least one token is needed"
    assert "temperature: is 3.0" in refused("a", SamplingParams(temperature=3.0))
    assert refused("a", SamplingParams(max_tokens="7")) == "max_tokens: Expected `int`, got `str`"  # type: ignore[arg-type]
    assert "max_tokens: is 5000, the prompt has" in refused("a", SamplingParams(max_tokens=5000))
    assert refused("a", SamplingParams(seed=2**63)).startswith(f"seed: is {2**63}, must be at least")
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.role: is 'judge', must be one of"):
        llm.chat([{"role": "judge", "content": "?"}])
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\[0\]: Object contains unknown field `text`"):
        llm.chat([CHAT, [{"role": "user", "text": "?"}]])
    with pytest.raises(InvalidRequestError, match=r"level: 3 is none of 1, 2"):
        llm.sleep(3)
    with pytest.raises(InvalidRequestError, match=r"tags: 'kv' is none of weights, kv_cache"):
        llm.wake(["kv"])
    with pytest.raises(ConfigError, match=r"engine\.kv_memroy: unknown key; the nearest known one is"):
        LLM(tiny_model, kv_memroy="8MiB")
    with LLM(tiny_model, **SMALL, max_model_len=64) as small, pytest.raises(ContextLengthError) as refusal:
        small.generate([[1] * 64])
    assert str(refusal.value).endswith("the model takes 64 here; LLM(..., max_model_len=...) allows up to 4096")
    with LLM(tiny_model, **SMALL | {"kv_memory": "1MiB"}) as small, pytest.raises(ContextLengthError) as refusal:
        small.generate([[1] * 4000])
    assert str(refusal.value).endswith(" here; LLM(..., kv_memory=...) allows up to 4096")


@pytest.mark.parametrize(
    ("prompts", "kind"), [(None, "NoneType"), (5, "int"), (b"abc", "bytes"), ({"prompt": "a"}, "dict"), ({"a"}, "set")]
)
def test_what_is_no_prompt_is_refused_by_its_type(llm: LLM, prompts: Any, kind: str) -> None:
    form = f"must be a text or token ids, or a list of either, not {kind}"
    with pytest.raises(InvalidRequestError, match=f"^prompts: {form}$"):
        llm.generate(prompts)
    with pytest.raises(InvalidRequestError, match=rf"^prompts\[1\]: must be a text or token ids, not {kind}$"):
        llm.generate(["a", prompts])
    with pytest.raises(
        InvalidRequestError, match=f"^messages: must be a list of messages, or of such lists, not {kind}$"
    ):
        llm.chat(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 1}, "greedy", [None]])
def test_what_is_no_sampling_params_is_refused_by_its_type(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^params(\[0\])?: must be SamplingParams, not (dict|str|NoneType)$"):
        llm.generate(["a"], params)


def test_prompts_come_as_arrays_and_from_generators_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    rows = [[5, 6, 7], [8]]
    told = [output.token_ids for output in llm.generate(rows, params)]
    for array in (np.array, torch.tensor):
        prompts: Any = [array(row) for row in rows]
        assert [output.token_ids for output in llm.generate(prompts, params)] == told
        assert llm.generate(prompts[0], params)[0].token_ids == told[0]
        assert llm.generate(prompts[1:], params)[0].token_ids == told[1]
    generator: Any = (row for row in rows)
    assert [output.token_ids for output in llm.generate(generator, params)] == told


def test_prompts_without_params_are_answered_as_the_model_itself_says(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "max_new_tokens": 5}))
    prompt = random_prompt(20, seed=3)
    with LLM(folder, **SMALL) as llm:
        greedy = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=5))
        assert llm.generate(prompt)[0].token_ids == greedy[0].token_ids
        assert len(llm.generate(prompt, SamplingParams(max_tokens=9, ignore_eos=True))[0].token_ids) == 9


def test_no_prompts_have_no_answers(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_the_parameters_are_the_services() -> None:
    given = SamplingParams().options().given
    assert given == {name: row.default for name, row in PARAMETERS.items() if name in given}
    unset = {"max_tokens", "seed", "logprobs", "grammar", "prompt_logprobs", "allowed_token_ids"}
    assert PARAMETERS.keys() - given.keys() == unset, "those that nobody has set"


def test_words_and_tokens_that_an_answer_must_not_have_and_what_vllm_alone_has(llm: LLM) -> None:
    prompt = random_prompt(20, seed=3)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = llm.generate(prompt, params)[0].token_ids
    word = llm.tokenizer.decode(plain[:1])
    (answer,) = llm.generate(prompt, msgspec.structs.replace(params, bad_words=[word]))
    assert plain[0] not in answer.token_ids
    (answer,) = llm.generate(prompt, msgspec.structs.replace(params, allowed_token_ids=[30, 40]))
    assert {*answer.token_ids} <= {30, 40}
    with pytest.raises(InvalidRequestError, match="vllm_xargs: is for workers with vLLM alone"):
        llm.generate(prompt, SamplingParams(vllm_xargs={"a": 1}))


def test_a_terminal_sees_progress_and_a_file_does_not(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert capsys.readouterr() == ("", "")
    with progress_bar(2, shown=True) as report:
        report(2, 10, 20)
    (line,) = capsys.readouterr().err.splitlines()
    assert "2/2" in line
    assert "prefill" in line
    assert "decode" in line


def test_a_closed_model_says_so_and_ends_who_waits(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SMALL)
    stream = llm.stream("a", SamplingParams(max_tokens=3000, ignore_eos=True))
    next(stream)
    engine = [thread for thread in threading.enumerate() if thread.name == "engine"]
    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="this LLM is closed"):
        list(stream)
    with pytest.raises(UnavailableError, match="this LLM is closed"):
        llm.generate("a")
    assert not engine[-1].is_alive()


def test_a_model_that_nobody_holds_is_closed(tiny_model: Path) -> None:
    llm = LLM(tiny_model, **SMALL)
    engine = [thread for thread in threading.enumerate() if thread.name == "engine"][-1]
    llm.generate("a", SamplingParams(max_tokens=2))
    del llm
    assert not engine.is_alive()


@pytest.mark.skipif(ON_DEVICE.get("device") == "cuda", reason="others use the GPU's memory at the same time")
def test_a_closed_model_gives_its_memory_back(tiny_model: Path) -> None:
    def held_bytes() -> int:
        """Of memory as the KV slab's."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))

    before = held_bytes()
    llm = LLM(tiny_model, **SMALL)
    llm.generate([random_prompt(2000, seed=1)], SamplingParams(max_tokens=2))
    assert held_bytes() > before + (1 << 20)
    llm.close()
    assert held_bytes() == before


@NEEDS_TWO
def test_two_ranks_answer_as_one_does(tiny_model: Path, llm: LLM) -> None:
    prompts, before = [random_prompt(40, seed=5), random_prompt(3, seed=6)], psutil.Process().children()
    with LLM(tiny_model, **SMALL, tensor_parallel=2) as two:
        assert len(psutil.Process().children()) == len(before) + 1
        assert [one.token_ids for one in two.generate(prompts, long_greedy())] == [
            one.token_ids for one in llm.generate(prompts, long_greedy())
        ]
        two.sleep(1)
        two.wake()
        assert len(two.generate(prompts, SamplingParams(seed=2, max_tokens=4))) == 2
    assert psutil.Process().children() == before


def test_ranks_are_refused_where_they_would_end_with_a_thread(tiny_model: Path) -> None:
    refused: list[str] = []

    def start() -> None:
        with pytest.raises(ConfigError) as error:
            LLM(tiny_model, tensor_parallel=2)
        refused.append(str(error.value))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert refused == ["tensor_parallel: its processes end with the thread that starts them: use the main thread"]


@NEEDS_TWO
def test_a_lost_rank_is_an_error_and_not_the_end_of_the_program(tiny_model: Path) -> None:
    before = psutil.Process().children()
    with LLM(tiny_model, **SMALL, tensor_parallel=2) as llm:
        stream = llm.stream("a", SamplingParams(max_tokens=3000, ignore_eos=True))
        next(stream)
        (rank,) = [child for child in psutil.Process().children() if child not in before]
        rank.kill()
        with pytest.raises(RankLostError, match="was ended by SIGKILL"):
            list(stream)
        with pytest.raises(RankLostError):
            llm.generate("a")


INTERRUPTED = """
import json, sys
from baton import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel=2, **json.loads(sys.argv[2]))
for number, delta in enumerate(llm.stream(["a", "b"], SamplingParams(max_tokens=4000, ignore_eos=True))):
    if number == 2:
        print("runs", flush=True)
"""


@NEEDS_TWO
def test_ctrl_c_leaves_no_process_and_no_folder(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tiny_model), json.dumps(SMALL)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "runs\n"
        ranks = [process.pid for process in psutil.Process(child.pid).children(recursive=True)]
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=110)
    assert child.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert len(ranks) == 1
    assert_gone(ranks)
    assert list(tmp_path.iterdir()) == []


def test_importing_baton_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, baton; print({'torch', 'msgspec', 'numpy'} & set(sys.modules));"
        "from baton import LLM; print('torch' in sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\nFalse\n"
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from baton import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_the_example_runs(tiny_model: Path) -> None:
    command = [sys.executable, "example.py", str(tiny_model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=110)
    assert "Assistant:" in done.stdout
    assert done.stderr == ""
