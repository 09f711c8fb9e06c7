"""The fields that bodies of several dialects take: Baton's, and vLLM's sampling parameters and chat template
variables."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from baton_proto.sampling import PARAMETERS
from router.api.dialects.dialect import Asked
from router.api.dialects.json_body import ABSENT
from router.api.wishes.cache_hints import CacheFields
from router.api.wishes.names import Name
from router.api.wishes.sampling_options import AS_NAMED
from router.api.wishes.template_variables import template_variables
from router.api.wishes.validation import ALL_TOKENS, Call, Kept, check_thinking

OWN_NAMES = ("max_tokens", "logprobs", "prompt_logprobs")
"""Sampling parameters that each dialect spells in its own way, or has no place for in its answers."""
SAMPLED = [name for name in AS_NAMED if name not in OWN_NAMES]


class TextBody(CacheFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of every request for text."""

    model: Name | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None  # where no header gives one

    def asked(
        self, prompt_field: str, form: Any = None, add_special_tokens: bool = True, kept: Kept = ALL_TOKENS
    ) -> Asked:
        """`form`: see Asked. Raises InvalidRequestError."""
        call = Call(
            prompt_field=prompt_field,
            add_special_tokens=add_special_tokens,
            request_id=self.request_id or "",
            kept=kept,
            model=self.model,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            hint=self.hint(),
        )
        return Asked(call, bool(self.stream), form)


if TYPE_CHECKING:

    class SampledFields(TextBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """msgspec defines it below: one field for each name of SAMPLED. An absent one is None."""

else:
    _FIELDS = [(name, PARAMETERS[name].type | None, None) for name in SAMPLED]
    SampledFields = msgspec.defstruct("SampledFields", _FIELDS, bases=(TextBody,), frozen=True, kw_only=True)


class ExtendedBody(SampledFields, frozen=True, kw_only=True):
    chat_template_kwargs: Raw = ABSENT
    thinking_token_budget: int | None = None

    def sampled(self) -> dict[str, Any]:
        """Field of SamplingParams -> its value, where the caller gives one."""
        return {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}

    def variables(self, ours: dict[str, Any]) -> dict[str, Any]:
        """`ours`, and what the caller tells the chat template, which goes before. Raises InvalidRequestError."""
        return {**ours, **template_variables(self.chat_template_kwargs)}

    def thinking_tokens(self) -> int | None:
        """Raises InvalidRequestError."""
        return check_thinking("thinking_token_budget", self.thinking_token_budget)


def with_known(
    base: type[ExtendedBody], not_served: Mapping[str, tuple[Any, ...]], without_effect: Sequence[str]
) -> type[ExtendedBody]:
    """`base` with fields that are known and not served, or have no effect; see json_body.py."""
    fields = [(name, Any, None) for name in not_served] + [(name, Raw, ABSENT) for name in without_effect]
    told = {"not_served": not_served, "without_effect": without_effect}
    made: Any = msgspec.defstruct("KnownFields", fields, bases=(base,), namespace=told, frozen=True, kw_only=True)
    known: type[ExtendedBody] = made
    return known
