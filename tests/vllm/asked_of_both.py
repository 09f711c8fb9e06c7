"""Requests that a vLLM server and a service of ours answer alike."""

from typing import Any

PROMPT = "The capital of France is"
MIXED = "Zoë says: 你好 🙂, and"
TURN = {"role": "user", "content": "What is the capital of France?"}
BEGUN = {"role": "assistant", "content": "The capital"}
DOCUMENT = {"title": "Cities", "text": "Paris is large."}

TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "token ids": {"prompt": [504, 3575, 282, 4649, 314], "return_token_ids": True},
    "several prompts": {"prompt": [PROMPT, "One two"]},
    "a stop string": {"stop": [" Paris"]},
    "a stop string that is shown": {"stop": [" Paris"], "include_stop_str_in_output": True},
    "a stop token": {"stop_token_ids": [7042], "return_token_ids": True},
    "a stop token that is shown": {"stop_token_ids": [7042], "include_stop_str_in_output": True},
    "min_tokens": {"stop_token_ids": [7042], "min_tokens": 6},
    "special tokens": {"prompt": "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n", "ignore_eos": True}
    | {"skip_special_tokens": False, "max_tokens": 40},
    "special tokens side by side": {"prompt": "a", "logit_bias": {"1": 100, "2": 90}, "ignore_eos": True}
    | {"skip_special_tokens": False, "spaces_between_special_tokens": False, "max_tokens": 4},
    "the last tokens": {"prompt": "One two three four five six", "truncate_prompt_tokens": 3, "echo": True},
    "as many tokens as fit": {"truncate_prompt_tokens": -1},
    "the first tokens": {"truncate_prompt_tokens": 3, "truncation_side": "right", "echo": True},
    "without the tokens of training": {"add_special_tokens": False, "return_token_ids": True},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities by ids": {"logprobs": 1, "return_tokens_as_token_ids": True},
    "log-probabilities of given tokens": {"logprobs": 1, "logprob_token_ids": [7042, 504, 282]},
    "an echo": {"echo": True},
    "an echo of token ids": {"prompt": [504, 3575, 2, 4649, 314], "echo": True, "logprobs": 0},
    "an echo with log-probabilities": {"echo": True, "logprobs": 2},
    "an echo of several": {"prompt": ["One", "One two three"], "echo": True, "logprobs": 1},
    "an echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "of the prompt": {"prompt_logprobs": 2},
    "of both": {"prompt_logprobs": 0, "logprobs": 1},
    "of a prompt with characters in parts": {"prompt": MIXED, "prompt_logprobs": 1, "logprobs": 1, "echo": True},
    "a bias": {"logit_bias": {"7042": -100}},
    "bad words": {"bad_words": ["Paris", "a city"]},
    "allowed tokens": {"allowed_token_ids": [504, 3575, 282, 4649, 314, 7042], "return_token_ids": True},
}
"""Bodies of /v1/completions, greedy."""

CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "log-probabilities of given tokens": {"logprobs": True, "logprob_token_ids": [7042, 504]},
    "of the prompt": {"prompt_logprobs": 1, "return_token_ids": True},
    "a stop string that is shown": {"stop": ["Paris"], "include_stop_str_in_output": True},
    "special tokens": {"skip_special_tokens": False, "max_tokens": 40},
    "no turn is opened": {"add_generation_prompt": False},
    "the final message goes on": {"messages": [TURN, BEGUN], "continue_final_message": True}
    | {"add_generation_prompt": False, "return_token_ids": True},
    "documents": {"documents": [DOCUMENT]},
    "bad words": {"bad_words": ["Paris"]},
    "the last tokens": {"truncate_prompt_tokens": 5, "return_token_ids": True},
}
"""Bodies of /v1/chat/completions, greedy."""


def bodies() -> list[tuple[str, str, dict[str, Any]]]:
    """(name, path, body)"""
    of_texts = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    of_chats = {"model": "smollm2", "messages": [TURN], "max_tokens": 12, "temperature": 0}
    asked = [(f"text: {name}", "/v1/completions", of_texts | body) for name, body in TEXTS.items()]
    return asked + [(f"chat: {name}", "/v1/chat/completions", of_chats | body) for name, body in CHATS.items()]
