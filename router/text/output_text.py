"""The text of one choice as its tokens arrive: whole characters, ended by a stop string."""

from collections.abc import Sequence, Set

from baton_proto.sampling import TokenLogprobs
from router.text.detokenizer import NO_MARKS, make_detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer


class OutputText:
    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        min_tokens: int = 0,
        marks: Set[int] = NO_MARKS,
        includes_stop: bool = False,
    ) -> None:
        """Stop strings are looked for in the text that tokens from number `min_tokens` on add. `marks`: special tokens
        that are spelled out. `includes_stop`: what ends the choice, a stop string or a stop token, belongs to the
        text."""
        self._detokenizer = make_detokenizer(tokenizer, marks)
        self._stop_strings = StopStrings(stop, includes_stop) if stop else None
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return None if self._stop_strings is None else self._stop_strings.found

    @property
    def mid_character(self) -> bool:
        """The last token has left a character without its last bytes."""
        return self._detokenizer.mid_character

    def push(self, token_ids: Sequence[int], stop_token: int | None = None) -> tuple[int, str, bool]:
        """Returns (how many of the tokens are accepted, text that may be shown now, stopped).

        `stop_token` is the EOS or stop token that ends the choice, when the last token is one; it is accepted, and has
        no text unless it is included. The token that completes a stop string stops the choice and is the last that is
        accepted.
        """
        if self._stopped:
            return 0, "", True
        if self._includes_stop:
            stop_token = None
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

    def take(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], finish: str | None, stop_token: int | None
    ) -> tuple[str, str | None]:
        """Takes an engine's news, of which `token_ids` and `logprobs` keep what is accepted. Returns (text that may be
        shown now, finish reason)."""
        accepted, text, stopped = self.push(token_ids, stop_token)
        del token_ids[accepted:], logprobs[accepted:]
        if stopped:
            return text, "stop"
        return (text, None) if finish is None else (text + self.flush(), finish)

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
