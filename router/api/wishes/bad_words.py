"""Words that an answer must not have, as the tokens that would write them."""

from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

Words = tuple[str, ...]


def spelled(tokenizer: Tokenizer, words: Words, name: str) -> tuple[tuple[int, ...], ...]:
    """As vLLM has them: each word at the start of a text, and behind a space where its first token is another one then
    and its tokens are as many. `name`: the caller's of the words. Raises InvalidRequestError."""
    found = []
    for word in words:
        first, behind_space = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False).tolist()) for space in ("", " ")
        )
        if not first:
            raise InvalidRequestError(name, "has a word without a token; each needs at least one")
        found.append(first)
        if len(behind_space) == len(first) and behind_space[0] != first[0]:
            found.append(behind_space)
    return tuple(found)
