"""What prompts cost and what they brought, in tokens: of one request, of a worker, or of a whole router."""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from baton_proto.decoding import Count


class TokenCounts(Struct, array_like=True):
    """Messages, counters and rows that tell tokens are subclasses, or have one of these, and pass it on whole."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0  # of the prompt: nobody had to compute them
    output_tokens: Count = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that somebody had to compute."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def hit_rate(self) -> float | None:
        """The share of the prompt that was cached; None: there was no prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def of_prompt(self, num_tokens: int) -> "TokenCounts":
        """Counts of the prompt alone, of so many tokens: what is cached of a replay's output does not count."""
        return TokenCounts(num_tokens, min(self.cached_tokens, num_tokens))

    def add(self, other: "TokenCounts") -> None:
        for name in TOKEN_COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def since(self, before: "TokenCounts") -> "TokenCounts":
        """What has been added since it was as `before`."""
        return TokenCounts(*(getattr(self, name) - getattr(before, name) for name in TOKEN_COUNTS))


TOKEN_COUNTS: Final = TokenCounts.__struct_fields__


def counts_of(other: object) -> TokenCounts:
    """The counts of what has fields of their names, such as a message of inference.proto."""
    return TokenCounts(*(getattr(other, name) for name in TOKEN_COUNTS))


def counts_of_request(prompt_tokens: int, choices: Sequence[TokenCounts]) -> TokenCounts:
    """Counts the prompt once, whatever the number of choices, and as cached what no choice had to compute."""
    cached_tokens = min((choice.cached_tokens for choice in choices), default=0)
    return TokenCounts(prompt_tokens, cached_tokens, sum(choice.output_tokens for choice in choices))
