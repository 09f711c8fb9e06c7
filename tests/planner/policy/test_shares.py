"""What several models may hold of the GPUs that all of them want."""

from hypothesis import given, strategies as st
from msgspec.structs import replace

from planner.policy.shares import Claim, share_of

claims = st.builds(
    Claim, holds=st.integers(0, 6), wants=st.integers(0, 20), least=st.integers(0, 2), weight=st.integers(1, 3)
)


def test_what_nobody_else_wants_is_mine() -> None:
    assert share_of(Claim(1, least=1), [], 8) == 8
    assert share_of(Claim(1, least=1), [Claim(2, wants=3, least=1)], 8) == 5


def test_models_that_all_want_everything_share_by_weight() -> None:
    heavy, light = Claim(6, wants=8, least=1, weight=3), Claim(2, wants=8, least=1)
    assert (share_of(heavy, [light], 8), share_of(light, [heavy], 8)) == (6, 2)


def test_a_model_does_not_grow_into_what_others_have_not_given_up_yet() -> None:
    greedy, asking = Claim(7, wants=8, least=1), Claim(1, wants=4, least=1)
    assert share_of(greedy, [asking], 8) == 4, "it has to give three back"
    assert share_of(asking, [greedy], 8) == 1
    assert share_of(asking, [replace(greedy, holds=5)], 8) == 3


def test_a_model_keeps_what_it_holds_within_its_share_though_others_hold_too_much() -> None:
    assert share_of(Claim(1, least=1), [Claim(4, wants=4, least=1)], 4) == 1


def test_what_each_needs_at_least_goes_before_what_others_want() -> None:
    assert share_of(Claim(0, least=2), [Claim(0, wants=9, least=1, weight=100)], 3) == 2


@given(st.lists(claims, min_size=1, max_size=5), st.integers(0, 12))
def test_no_model_grows_beyond_the_budget_and_those_within_it_stay_within_it(models: list[Claim], gpus: int) -> None:
    held = sum(model.holds for model in models)
    for index, mine in enumerate(models):
        share = share_of(mine, models[:index] + models[index + 1 :], gpus)
        assert 0 <= share <= gpus
        assert share <= max(mine.holds, gpus - (held - mine.holds))
