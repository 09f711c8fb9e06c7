"""One number decides what chance has a part in, and decides it the same way again."""

from router.requests.draw import CALL_ID_CHARS, Draw


def all_of(draw: Draw) -> list[object]:
    ids = draw.call_ids(0), draw.call_ids(1)
    return [draw.seed(), draw.secret("a"), draw.secret("b"), *(give() for give in ids for _ in range(3))]


def test_a_draw_decides_the_same_again_and_nothing_twice() -> None:
    draw = Draw.fresh()
    many = [draw, Draw.fresh(), draw.of_prompt(0), draw.of_prompt(1)]
    assert all_of(draw) == all_of(Draw(draw.created_s, draw.dice))
    decided = [one for each in many for one in all_of(each)]
    assert len(set(decided)) == len(decided)


def test_seeds_are_of_63_bits_and_ids_of_calls_of_nine_letters_and_digits() -> None:
    draws = [Draw.fresh() for _ in range(200)]
    assert 2**62 < max(draw.seed() for draw in draws) < 2**63
    ids = [draw.call_ids(0)() for draw in draws]
    assert all(len(one) == CALL_ID_CHARS and one.isascii() and one.isalnum() for one in ids)
