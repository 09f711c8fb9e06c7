"""The sampling parameters of a Python caller."""

from collections.abc import Sequence
from typing import Any

import msgspec

from baton_proto import sampling
from baton_proto.sampling import PARAMETERS, VLLM_ALONE
from router.api.wishes.sampling_options import Options
from runtime.errors import InvalidRequestError


class SamplingParams(sampling.SamplingParams, frozen=True, kw_only=True):
    """The service's sampling parameters, with its names and defaults, and stop strings. They are checked when a prompt
    is given."""

    max_tokens: int | None = None  # type: ignore[assignment]  # None: as many as fit
    seed: int | None = None  # type: ignore[assignment]  # None: each prompt draws one
    allowed_token_ids: tuple[int, ...] | None = None  # type: ignore[assignment]  # None: all
    stop: str | Sequence[str] = ()  # the text ends before the first of these strings

    def options(self) -> Options:
        """Raises InvalidRequestError for a value of another type."""
        if name := next((name for name in VLLM_ALONE if getattr(self, name)), None):
            raise InvalidRequestError(name, "is for workers with vLLM alone; leave it out")
        values = {name: value for name in PARAMETERS if (value := getattr(self, name)) is not None}
        given = {name: _typed(name, value, PARAMETERS[name].type) for name, value in values.items()}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return Options(given=given, stop=_typed("stop", stop, tuple[str, ...]))


def _typed(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(name, str(error)) from None
