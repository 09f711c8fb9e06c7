"""Reads a request of the Open Inference Protocol: tensors and parameters, by the names that several servers gave
them."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from baton_proto.generated import open_inference_pb2 as pb
from baton_proto.sampling import PARAMETERS
from router.api.kserve.tensors import BYTES, read_inputs
from router.api.wishes.json_shape import check_depth
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import Prompt
from runtime.errors import InvalidRequestError, UnknownFieldError, nearest, shown

MAX_JSON_CHARS: Final = 64 * 1024
ANY: Final = -1

TEXT, IDS, STREAM, SAMPLING = "text_input", "input_ids", "stream", "sampling_parameters"
INPUTS: Final = {TEXT: (BYTES, 1), IDS: ("INT64", ANY), STREAM: ("BOOL", 1), SAMPLING: (BYTES, 1), "stop": (BYTES, ANY)}
"""What ModelMetadata says of them: (datatype, values). Sampling parameters may be tensors, too."""
OUTPUTS: Final = {"text_output": BYTES, "finish_reason": BYTES, "output_ids": "INT32", "output_lengths": "INT32"}

OTHER_NAMES: Final = {"streaming": STREAM, "stop_words": "stop"}  # Dynamo's, TensorRT-LLM's
OF_SAMPLING: Final = [name for name in PARAMETERS if name not in ("grammar", "prompt_logprobs", "logprobs")]
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "exclude_input_in_output": (True,),
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
    "priority": (0,),
    EMPTY_FINAL: (True, False),
    "binary_data_output": (True, False),
}
"""Parameters and inputs of other servers -> the values that change nothing here."""
KNOWN: Final = (TEXT, IDS, STREAM, SAMPLING, "stop", "n", "timeout", *OF_SAMPLING)


class Wish(Struct, frozen=True):
    """A ModelInferRequest, read."""

    prompt: Prompt
    prompt_field: str
    options: Options
    stream: bool
    timeout_s: float | None
    outputs: frozenset[str]
    empty_final: bool


def read_wish(request: pb.ModelInferRequest, max_model_len: int) -> Wish:
    """`max_model_len`: tokens. Raises InvalidRequestError."""
    given: dict[str, Any] = {name: _parameter(value) for name, value in request.parameters.items()}
    inputs = read_inputs(request, max_model_len)
    for source in (given, inputs):
        if SAMPLING in source:
            given |= _object(_text(SAMPLING, source.pop(SAMPLING)))
    empty_final = bool(given.get(EMPTY_FINAL))
    given = {OTHER_NAMES.get(name, name): value for name, value in {**given, **inputs}.items()}
    for name in [name for name in given if name in HARMLESS]:
        value = _single(name, given.pop(name))
        if value not in HARMLESS[name]:
            raise InvalidRequestError(name, f"cannot be {shown(value)} here; leave it out")
    for name in given:
        if name not in KNOWN:
            raise UnknownFieldError(name[:40], nearest(name, KNOWN, "input"))
    prompt_field, prompt = _prompt(given)
    stop, n, timeout_us = given.pop("stop", ()), given.pop("n", None), given.pop("timeout", None)
    stream = _typed(STREAM, _single(STREAM, given.pop(STREAM, False)), bool)
    names = {output.name for output in request.outputs} or set(OUTPUTS)
    if strange := names - set(OUTPUTS):
        raise InvalidRequestError("outputs", f"{shown(min(strange))} is none of {', '.join(OUTPUTS)}")
    options = Options(
        given={name: _sampling(name, value) for name, value in given.items()},
        stop=_stop_strings(stop),
        n=None if n is None else _typed("n", _single("n", n), int),
    )
    timeout_s = None if timeout_us is None else _typed("timeout", _single("timeout", timeout_us), int) / 1e6
    if timeout_s is not None and timeout_s <= 0:
        timeout_s = None  # as Triton reads it
    return Wish(prompt, prompt_field, options, stream, timeout_s, frozenset(names), empty_final)


def _prompt(given: dict[str, Any]) -> tuple[str, Prompt]:
    """Takes it from the inputs."""
    if (TEXT in given) == (IDS in given):
        problem = f"contradicts {IDS}: leave one of them out" if TEXT in given else f"is missing; it or {IDS} is needed"
        raise InvalidRequestError(TEXT, problem)
    if TEXT in given:
        return TEXT, _text(TEXT, given.pop(TEXT))
    ids = given.pop(IDS)
    if getattr(ids, "dtype", None) is None or ids.dtype.kind not in "iu":
        raise InvalidRequestError(IDS, "must be a tensor of integers")
    return IDS, ids.tolist()


def _parameter(value: pb.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    return None if kind is None else getattr(value, kind)


def _object(text: str) -> dict[str, Any]:
    if len(text) > MAX_JSON_CHARS:
        raise InvalidRequestError(SAMPLING, f"has {len(text)} characters; at most {MAX_JSON_CHARS} are allowed")
    check_depth(SAMPLING, text)
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(SAMPLING, f"is not a JSON object: {error}") from error
    if strange := found.keys() - {"stop", "n", *OF_SAMPLING}:
        raise InvalidRequestError(SAMPLING, f"{min(strange)[:40]!r} is no sampling parameter that is known here")
    return found


def _text(name: str, values: Any) -> str:
    value = _single(name, values)
    if not isinstance(value, str):
        raise InvalidRequestError(name, f"must be one text of datatype {BYTES}")
    return value


def _single(name: str, values: Any) -> Any:
    """The one value of a tensor; other values as they are."""
    if isinstance(values, str | bool | int | float | None):
        return values
    if len(values) != 1:
        raise InvalidRequestError(name, f"has {len(values)} values; one is needed")
    value = values[0]
    return value if isinstance(value, str) else _number(value)


def _number(value: Any) -> Any:
    """A 32-bit float becomes the decimal that the caller meant: 0.7, not 0.699999988."""
    number = value.item() if hasattr(value, "item") else value
    return float(f"{number:.7g}") if isinstance(number, float) else number


def _stop_strings(value: Any) -> list[str]:
    plain = value.tolist() if hasattr(value, "tolist") else value
    texts: list[str] = _typed("stop", [plain] if isinstance(plain, str) else plain, list[str])
    return texts


def _sampling(name: str, value: Any) -> Any:
    """The value as the type that PARAMETERS names."""
    if isinstance(PARAMETERS[name].default, tuple | dict):
        plain: Any = value.tolist() if hasattr(value, "tolist") else value
    else:
        plain = _single(name, value)
    return _typed(name, plain, PARAMETERS[name].type)


def _typed(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind, str_keys=True, strict=False)  # Triton's clients write numbers as texts
    except msgspec.ValidationError as error:
        raise InvalidRequestError(name, str(error)) from None
