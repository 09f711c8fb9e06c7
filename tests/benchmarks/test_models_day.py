"""The simulated day of models that share GPUs."""

from benchmarks.models_day import SIZES, day, outcome


def test_models_with_gpus_of_their_own_are_in_time_and_those_that_share_wake_for_each_other() -> None:
    trace = day(1, 60)
    assert trace == day(1, 60)
    assert {asked.model for asked in trace} == {*SIZES}
    alone = outcome(1, trace, sum(SIZES.values()))
    shared = outcome(1, trace, 2)
    assert alone.in_time == alone.alone == shared.alone > 0.99
    assert shared.in_time < alone.in_time
    assert shared.wakes > alone.wakes >= len(SIZES)
