"""The fields that every protocol of HTTP takes beside its own: vLLM's sampling parameters and chat template variables,
and Baton's hints."""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from baton_proto.sampling import PARAMETERS
from router.api.dialects.dialect import Asked
from router.api.dialects.json_body import ABSENT
from router.api.wishes.cache_hints import longest_keep_s
from router.api.wishes.names import Name
from router.api.wishes.sampling_options import AS_NAMED
from router.api.wishes.template_variables import template_variables
from router.api.wishes.validation import check_thinking

OWN_NAMES = ("max_tokens", "logprobs", "prompt_logprobs")
"""Sampling parameters that each protocol spells in its own way, or has no place for in its answers."""
SAMPLED = [name for name in AS_NAMED if name not in OWN_NAMES]

if TYPE_CHECKING:

    class SampledFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
        """As msgspec defines it below: one field for each name of SAMPLED. An absent one is None."""

else:
    _FIELDS = [(name, PARAMETERS[name].type | None, None) for name in SAMPLED]
    SampledFields = msgspec.defstruct("SampledFields", _FIELDS, frozen=True, kw_only=True, forbid_unknown_fields=True)


class ExtendedBody(SampledFields, frozen=True, kw_only=True):
    model: Name | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: Name | None = None
    keep_cache_s: float | None = None
    drop_cache: bool | None = None
    chat_template_kwargs: Raw = ABSENT
    thinking_token_budget: int | None = None

    def sampled(self) -> dict[str, Any]:
        """Field of SamplingParams -> its value, where the caller gives one."""
        return {name: value for name in SAMPLED if (value := getattr(self, name)) is not None}

    def variables(self, ours: dict[str, Any]) -> dict[str, Any]:
        """For the chat template: `ours`, and before them what the caller says. Raises InvalidRequestError."""
        return {**ours, **template_variables(self.chat_template_kwargs)}

    def thinking_tokens(self) -> int | None:
        """Raises InvalidRequestError."""
        return check_thinking("thinking_token_budget", self.thinking_token_budget)

    def asked(self, prompt_field: str, keep_s: float, form: Any) -> Asked:
        """`keep_s`: for how long the protocol's own fields ask to keep the prompt; `form`: see Asked."""
        return Asked(
            prompt_field=prompt_field,
            model=self.model,
            stream=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            keep_s=longest_keep_s(self.keep_cache_s, keep_s),
            drop_cache=bool(self.drop_cache),
            form=form,
        )
