"""The engine in your own program, without a service: `python example.py`, or `python example.py FOLDER`."""

import sys

from baton import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2") as llm:
    prompts = ["The capital of France is", "Once upon a time"]
    for prompt, output in zip(
        prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32)), strict=True
    ):
        print(f"{prompt!r} -> {output.text!r} ({output.finish_reason})")

    print("Assistant: ", end="")
    messages = [{"role": "user", "content": "Why is the sky blue? One sentence."}]
    for delta in llm.stream(messages, SamplingParams(temperature=0.6, seed=1, max_tokens=64)):
        print(delta.text, end="", flush=True)
    print()
