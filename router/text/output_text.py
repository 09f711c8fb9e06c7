"""The text of one choice as its tokens arrive: whole characters, ended by a stop string."""

from collections.abc import Sequence

from router.text.detokenizer import make_detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer


class OutputText:
    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """Stop strings are looked for in the text that tokens from number `min_tokens` on add."""
        self._detokenizer = make_detokenizer(tokenizer)
        self._stop_strings = StopStrings(stop) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, token_ids: Sequence[int], stop_token: int | None = None) -> tuple[int, str, bool]:
        """Returns (how many of the tokens are accepted, text that may be shown now, stopped).

        `stop_token` is the EOS or stop token that ends the choice, when the last token is one; it is accepted and has
        no text. The token that completes a stop string stops the choice and is the last that is accepted.
        """
        if self._stopped:
            return 0, "", True
        if self._stop_strings is None:
            has_text = token_ids[:-1] if token_ids and token_ids[-1] == stop_token else token_ids
            return len(token_ids), self._detokenizer.push(has_text), False
        shown: list[str] = []
        accepted = 0
        for accepted, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if accepted == len(token_ids) and token_id == stop_token:
                break
            shown.append(self._search(self._stop_strings, self._detokenizer.push((token_id,))))
            if self._stopped:
                break
        return accepted, "".join(shown), self._stopped

    def flush(self) -> str:
        """The text that was held back, at the end of the choice; empty when a stop string has ended it."""
        if self._stopped:
            return ""
        rest = self._detokenizer.flush()
        if self._stop_strings is None:
            return rest
        return self._search(self._stop_strings, rest) + self._stop_strings.flush()

    def _search(self, stop_strings: StopStrings, text: str) -> str:
        if self._num_tokens < self._min_tokens:
            return text
        shown, self._stopped = stop_strings.push(text)
        return shown
