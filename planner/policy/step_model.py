"""The planner's step-time model: the profile, fitted (runtime/config/step_fit.py) to the steps that workers time."""

from collections.abc import Iterable

from msgspec import Struct

from baton_proto.planner import StepSample
from runtime.config.step_fit import decode_rows, fitted, prefill_rows
from runtime.config.step_times import StepTimes

WARM_S = 30.0  # a new worker's first steps compile, allocate and fill caches
WINDOW = 256  # samples kept of each kind
AT_ONCE = 16  # samples of each kind that one interval adds: the window spans a minute or more


class StepModel(Struct, frozen=True):
    """Samples, one per row, the newest last, and the step times fitted to them."""

    prefill: list[list[float]]  # n, pairs, ms
    decode: list[list[float]]  # 1, B, K, ms
    times: StepTimes


def initial_model(profile: StepTimes) -> StepModel:
    return StepModel([], [], profile)


def learned(model: StepModel, samples: Iterable[StepSample], profile: StepTimes) -> StepModel:
    """The model after one more interval. Steps of new workers, and steps of both kinds at once, are left out."""
    good = [sample for sample in samples if sample.ready_for_s >= WARM_S]
    prefill, decode = prefill_rows(good), decode_rows(good)
    if not prefill and not decode:
        return model
    prefill = (model.prefill + _thinned(prefill))[-WINDOW:]
    decode = (model.decode + _thinned(decode))[-WINDOW:]
    return StepModel(prefill, decode, fitted(prefill, decode, profile))


def _thinned(rows: list[list[float]]) -> list[list[float]]:
    return rows[:: max(1, -(-len(rows) // AT_ONCE))]
