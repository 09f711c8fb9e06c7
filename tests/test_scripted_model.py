"""The scripted model says its script, also in transformers."""

from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tests.scripted_families import FAMILIES, HARMONY
from tests.scripted_model import AFTER_TOOL, write_scripted_model
from tests.spine.oracle import Oracle

VOCAB_SIZE = 1 << 20
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
TOLD = [*ASKED, {"role": "assistant", "content": "Hm."}, {"role": "tool", "content": "found"}]
CALLS = (
    "<|channel|>analysis<|message|>Grüße an 世界 🏃‍♀️.<|end|><|start|>assistant<|channel|>commentary to=functions.find "
    '<|constrain|>json<|message|>{"path": "a.py", "line": 3}<|call|>'
)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_script_is_said_at_any_temperature_and_another_one_after_a_tool(tmp_path: Path, architecture: str) -> None:
    scripts = {AFTER_TOOL: "<|channel|>final<|message|>It is there.", "true": CALLS}
    model = write_scripted_model(tmp_path, scripts, HARMONY, architecture)
    oracle, tokenizer = Oracle(model), Tokenizer(model, VOCAB_SIZE)
    for messages, script in ((ASKED, CALLS), (TOLD, scripts[AFTER_TOOL] + "<|return|>")):
        prompt = tokenizer.chat(messages).tolist()
        answer = oracle.greedy(prompt, 400)
        assert tokenizer.decode(answer, skip_special_tokens=False) == script
        rows = oracle.logits(prompt + answer, len(answer) + 1)[:-1]
        assert (rows / 2).softmax(-1).max(-1).values.min() > 0.999  # at temperature 2


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_writes_turns_tools_and_calls(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(write_scripted_model(tmp_path, "Hello.", FAMILIES[name]), VOCAB_SIZE)
    call: dict[str, Any] = {
        "id": "123456789",
        "type": "function",
        "function": {"name": "find", "arguments": {"path": "a.py"}},
    }
    if name == "deepseek":
        call["function"]["arguments"] = '{"path": "a.py"}'
    told = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "found"}]
    text = tokenizer.decode(tokenizer.chat(told, {"tools": [{"type": "function"}]}).tolist(), skip_special_tokens=False)
    for part in ("<|script_0|>", "Find it.", "find", '{"path": "a.py"}', "found", '{"type": "function"}'):
        assert part in text
