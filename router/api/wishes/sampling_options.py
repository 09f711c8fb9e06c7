"""Sampling options as a caller wrote them, and the checks that make them the engine's SamplingParams."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from baton_proto.grammar import Grammar
from baton_proto.sampling import GREEDY_BELOW, MAX_PATTERN, PARAMETERS, Parameter, SamplingParams, XArgs
from runtime.checkpoint.model_config import read_object
from runtime.errors import ConfigError, InvalidRequestError, ModelError, shown

N = TypeVar("N", int, float)

GENERATION_CONFIG = "generation_config.json"
SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DEFAULTS = {name: name for name in SAME_NAME} | {"max_new_tokens": "max_tokens"}
"""Key of generation_config.json -> field of SamplingParams."""
OF_DRAWING = ("top_p", "top_k", "min_p")
NO_DEFAULTS: Mapping[str, Any] = {}
MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024  # of each: what might begin one is held back
MAX_WORD_CHARS = 256
MAX_XARGS_BYTES = 16 * 1024  # as JSON
OF_REPETITION = ("min_pattern_size", "max_pattern_size", "min_count")
XARGS_OF_SERVERS = ("kv_transfer_params", "ec_transfer_params")  # a connector of vLLM's would follow them

AS_NAMED = [name for name in PARAMETERS if name != "grammar"]
"""The sampling parameters whose name over HTTP is that of the row; a grammar has several."""


class Options(Struct, frozen=True, kw_only=True):
    """Sampling options as a caller wrote them."""

    given: Mapping[str, Any]  # field of SamplingParams -> its value, where the caller gave one
    names: Mapping[str, str] = {}  # field of SamplingParams -> the caller's name of it, where that is another
    stop: Sequence[str] = ()
    n: int | None = None
    includes_stop: bool = False  # see GenerateRequest, as the next one
    spells_special: bool = False
    cuts_max_tokens: bool = False  # more than fit are as many as fit, else they are refused

    def name_of(self, parameter: str) -> str:
        return self.names.get(parameter, parameter)


def chosen_defaults(chosen: str, model: Path) -> dict[str, Any]:
    """model_defaults() of what `router.generation_config` names; `model` is the model's folder. Raises ConfigError when
    it names nothing, and ModelError."""
    if chosen == "none":
        return {}
    folder = model if chosen == "auto" else Path(chosen).expanduser()
    if chosen != "auto" and not (folder / GENERATION_CONFIG).is_file():
        problem = f"{chosen!r} is neither auto nor none, nor a folder that has a {GENERATION_CONFIG}"
        raise ConfigError("router.generation_config", problem)
    return model_defaults(folder)


def model_defaults(folder: Path) -> dict[str, Any]:
    """Field of SamplingParams -> its value where a request does not say. These are the fields that vLLM takes from
    generation_config.json; `do_sample` is not read. Raises ModelError."""
    path = folder / GENERATION_CONFIG
    found = read_object(path) if path.is_file() else {}
    defaults = {}
    try:
        for theirs, ours in DEFAULTS.items():
            if found.get(theirs) is not None:
                value = msgspec.convert(found[theirs], PARAMETERS[ours].type)
                defaults[ours] = _checked(PARAMETERS[ours], theirs, value, 0)
    except (msgspec.ValidationError, InvalidRequestError) as error:
        problem = f"{GENERATION_CONFIG}: {error}; `none` in its place goes without its sampling parameters"
        raise ModelError(str(folder), problem) from error
    return defaults


def check_sampling(options: Options, vocab_size: int, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
    """Checks everything but what depends on the prompt. When the caller gave none, `max_tokens` is 1 and the seed is
    still to be drawn. `defaults`: see model_defaults. Raises InvalidRequestError."""
    check_range("n", options.n, 1, MAX_CHOICES)
    name = options.name_of("stop")
    if len(options.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(name, f"has {len(options.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    _check_texts(name, options.stop, MAX_STOP_CHARS)
    values: dict[str, Any] = {**defaults, "max_tokens": 1}
    if options.given.get("temperature", 1.0) < GREEDY_BELOW:  # they would change nothing, and cost time
        values = {name: value for name, value in values.items() if name not in OF_DRAWING}
    for name, value in options.given.items():
        values[name] = _checked(PARAMETERS[name], options.name_of(name), value, vocab_size)
    if ids := values.get("logprob_token_ids"):
        if values.get("logprobs") is None:
            problem = f"needs {options.name_of('logprobs')}, whose number it then decides"
            raise InvalidRequestError(options.name_of("logprob_token_ids"), problem)
        values["logprobs"] = len(ids)
    return SamplingParams(**values, is_seeded="seed" in values)


def _checked(parameter: Parameter, name: str, value: Any, vocab_size: int) -> Any:
    """The value as the engine wants it."""
    rule = parameter.rule
    if rule.most is not None and len(value) > rule.most:
        raise InvalidRequestError(name, f"has {len(value)} entries; at most {rule.most} are allowed")
    if rule.least and len(value) < rule.least:
        raise InvalidRequestError(name, f"is empty; at least {rule.least} is needed, or leave it out")
    match value:
        case bool() | Grammar():
            return value
        case [str(), *_]:
            _check_texts(name, value, MAX_WORD_CHARS)
            return tuple(dict.fromkeys(value))
        case Mapping() if parameter.name == "vllm_xargs":
            _check_xargs(name, value)
            return dict(value)
        case Mapping() if parameter.name == "repetition_detection":
            return _checked_repetition(name, value)
        case int() | float():
            check_range(name, value, rule.low, rule.high, rule.open_below)
            return parameter.default if value == rule.off else value
        case Mapping():
            check_in_vocabulary(name, value, vocab_size)
            for token_id, number in value.items():
                check_range(f"{name}[{token_id}]", number, rule.low, rule.high, rule.open_below)
            return dict(value)
    check_in_vocabulary(name, value, vocab_size)
    return tuple(dict.fromkeys(value))


def _checked_repetition(name: str, value: Mapping[str, int]) -> dict[str, int]:
    """Nothing where a pattern has no token."""
    for theirs, number in value.items():
        if theirs not in OF_REPETITION:
            raise InvalidRequestError(f"{name}.{shown(theirs)}", f"is unknown; {', '.join(OF_REPETITION)} are known")
        check_range(f"{name}.{theirs}", number, 0, MAX_PATTERN)
    least, most, count = (value.get(theirs, 0) for theirs in OF_REPETITION)
    if least > most:
        raise InvalidRequestError(f"{name}.min_pattern_size", f"is {least}, above max_pattern_size, which is {most}")
    if most:
        check_range(f"{name}.min_count", count, 2, MAX_PATTERN)
    return dict(value) if most else {}


def _check_texts(name: str, texts: Sequence[str], most: int) -> None:
    if not all(texts):
        raise InvalidRequestError(name, "has an empty string; at least one character is needed")
    if (longest := max(map(len, texts), default=0)) > most:
        raise InvalidRequestError(name, f"has a string of {longest} characters; at most {most} are allowed")


def _check_xargs(name: str, value: Mapping[str, Any]) -> None:
    for theirs in XARGS_OF_SERVERS:
        if theirs in value:
            raise InvalidRequestError(f"{name}.{theirs}", "is for the service to say; leave it out")
    try:
        msgspec.convert(value, XArgs)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(name, str(error)) from None
    if (num := len(msgspec.json.encode(value))) > MAX_XARGS_BYTES:
        raise InvalidRequestError(name, f"has {num} bytes; at most {MAX_XARGS_BYTES} are allowed")


def check_range(
    name: str, value: N | None, low: float | None, high: float | None, open_below: bool = False
) -> N | None:
    """Returns the value; None stays None. Raises InvalidRequestError, also for NaN, which lies outside of every range
    because every comparison with it is false."""
    if value is None:
        return None
    low_enough = high is None or value <= high
    high_enough = low is None or (value > low if open_below else value >= low)
    if low_enough and high_enough:
        return value
    limits = [] if low is None else [f"above {low}" if open_below else f"at least {low}"]
    limits += [] if high is None else [f"at most {high}"]
    raise InvalidRequestError(name, f"is {value}, must be {' and '.join(limits)}")


def check_in_vocabulary(name: str, token_ids: Sequence[int] | Mapping[int, Any], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(name, f"token id {token_id} is not in the vocabulary, 0 to {vocab_size - 1}")
