"""The text of one choice as its tokens arrive: whole characters, ended by a stop string. Used by generation."""

from collections.abc import Sequence
from itertools import zip_longest

from baton_proto.sampling import TokenLogprobs
from router.detokenizer import make_detokenizer
from router.request import TokenDetail
from router.stop_strings import StopStrings
from router.tokenizer import Tokenizer


class OutputText:
    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        """Stop strings are looked for in the text that tokens from number `min_tokens` on add."""
        self._tokenizer = tokenizer
        self._detokenizer = make_detokenizer(tokenizer)
        self._stop_strings = StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], stop_token: int | None = None
    ) -> tuple[list[TokenDetail], str, bool]:
        """(details of the accepted tokens, text that may be shown now, stopped).

        `logprobs` has an entry per token, or none. `stop_token` is the EOS or stop token that ends the choice, if the
        last token is one: it is accepted but has no text. With the token that completes a stop string the choice has
        stopped; that token is the last that is accepted, then and ever after.
        """
        if self._stopped:
            return [], "", True
        details: list[TokenDetail] = []
        shown: list[str] = []
        last = len(token_ids) - 1
        for position, (token_id, logprob) in enumerate(zip_longest(token_ids, logprobs)):
            details.append(TokenDetail(token_id, self._tokenizer.token_text(token_id), logprob))
            self._num_tokens += 1
            if position == last and token_id == stop_token:
                break
            shown.append(self._search(self._detokenizer.push(token_id)))
            if self._stopped:
                break
        return details, "".join(shown), self._stopped

    def flush(self) -> str:
        """What was held back, at the end of a choice that no stop string has ended; empty if one has."""
        if self._stopped:
            return ""
        rest = self._search(self._detokenizer.flush())
        return rest + self._stop_strings.flush()

    def _search(self, text: str) -> str:
        if self._num_tokens < self._min_tokens:
            return text
        shown, self._stopped = self._stop_strings.push(text)
        return shown
