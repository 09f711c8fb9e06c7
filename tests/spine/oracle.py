"""What transformers' own `generate` answers for the same weights in float32: the oracle of every greedy test."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class Oracle:
    """A model of transformers on the CPU. Answers are kept, so several services can be compared with one run of it."""

    def __init__(self, folder: Path, *, kv8: bool = False, slack: float = 0.0) -> None:
        """kv8: it attends to keys and values in 8 bits. slack: how far below the largest logit a right token's is."""
        self._kv8 = kv8
        self._slack = slack
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own deprecations are not ours
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(1)  # the workers of other tests need the other core
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = {eos} if isinstance(eos, int) else {*(eos or ())}
        self._answers: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}

    def logits(self, tokens: list[int], last: int = 0) -> torch.Tensor:
        """Of the token after each of `tokens`, or of the `last` ones: float32 [number of these, vocab]"""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(
                torch.tensor([tokens]), logits_to_keep=last, past_key_values=self._cache()
            ).logits[0]
        return logits

    def _cache(self) -> Any:
        """None: transformers' own."""
        from transformers import DynamicCache

        class Rounding(DynamicCache):
            def update(self, keys: torch.Tensor, values: torch.Tensor, *others: Any, **more: Any) -> Any:
                kept = (one.clamp(-448, 448).to(torch.float8_e4m3fn).to(one.dtype) for one in (keys, values))
                return super().update(*kept, *others, **more)

        return Rounding() if self._kv8 else None

    def greedy(
        self, prompt: list[int], max_tokens: int, ignore_eos: bool = False, guess: Sequence[int] = ()
    ) -> list[int]:
        """New token ids, the EOS that ended them included. A right `guess` takes one run of the model over all tokens,
        which shows that each of them is the likeliest one; anything else takes a run for each."""
        key = (tuple(prompt), max_tokens, ignore_eos)
        if key not in self._answers and self._is_answer(list(guess), prompt, max_tokens, ignore_eos):
            self._answers[key] = list(guess)
        if key not in self._answers:
            ids = torch.tensor([prompt])
            ends = {"eos_token_id": None} if ignore_eos else {}
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=self._cache(),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    **ends,
                )
            self._answers[key] = output[0, len(prompt) :].tolist()
        return self._answers[key]

    def _is_answer(self, guess: list[int], prompt: list[int], max_tokens: int, ignore_eos: bool) -> bool:
        ends = [] if ignore_eos else [number for number, token in enumerate(guess, 1) if token in self._eos]
        if not guess or len(guess) != min([max_tokens, *ends]):
            return False
        logits = self.logits(prompt + guess, len(guess) + 1)[:-1]
        found = logits.gather(-1, torch.tensor(guess)[:, None])[:, 0]
        return bool((found >= logits.amax(-1) - self._slack).all())
