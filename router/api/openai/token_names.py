"""What tokens are called beside their log-probabilities."""

from collections.abc import Sequence

from router.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # in the text of a token that begins or ends within a character
MAX_PARTS = 4  # tokens of a character, but for the last one


class TokenNames:
    """Of the tokens of one text, in their order. As in vLLM, a token that ends within a character has no text, and the
    one that completes the character has all of it."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool = False) -> None:
        """`as_ids`: a token's name has its id."""
        self._tokenizer = tokenizer
        self.as_ids = as_ids
        self._parts: list[bytes] = []  # of a character that the last tokens have begun

    def of(self, token_id: int) -> str:
        """The name of a token that may come next."""
        if self.as_ids:
            return f"token_id:{token_id}"
        text = self._tokenizer.token_text(token_id)
        return self._completed(token_id, text) if UNFINISHED in text else text

    def next(self, token_id: int) -> str:
        """The name of the token that comes next."""
        name = self.of(token_id)
        if not self._tokenizer.token_text(token_id).endswith(UNFINISHED):
            self._parts.clear()
        else:
            self._parts = [*self._parts, self._tokenizer.token_bytes(token_id)][-MAX_PARTS:]
        return name

    def top(self, top: Sequence[tuple[int, float]], token_id: int, logprob: float) -> dict[str, float]:
        """Name -> log-probability, as the API has it; the token that comes next is always among them."""
        return {self.of(token_id): finite(logprob)} | {self.of(other_id): finite(value) for other_id, value in top}

    def _completed(self, token_id: int, text: str) -> str:
        """`text` of the token, with the character that the tokens before it have begun. Empty: it ends within one."""
        for first in range(len(self._parts) - 1, -1, -1):
            parts = (*self._parts[first:], self._tokenizer.token_bytes(token_id))
            whole = b"".join(parts).decode("utf-8", "replace")
            if not whole.endswith(UNFINISHED):
                return whole
        return "" if text.endswith(UNFINISHED) else text


LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
