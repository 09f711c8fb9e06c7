from baton_proto.generated import inference_pb2 as pb
from baton_proto.token_counts import TokenCounts, counts_of, counts_of_request


def test_no_prompts_have_no_hit_rate() -> None:
    assert TokenCounts().hit_rate is None
    assert TokenCounts(8, 2).hit_rate == 0.25


def test_a_request_counts_its_prompt_once_and_what_no_choice_had_to_compute_as_cached() -> None:
    assert counts_of_request(100, []) == TokenCounts(100)
    assert counts_of_request(100, [TokenCounts(100, 64, 5), TokenCounts(100, 32, 6)]) == TokenCounts(100, 32, 11)


def test_what_is_cached_of_a_replays_output_does_not_count() -> None:
    assert TokenCounts(120, 112, 3).of_prompt(100) == TokenCounts(100, 100)


def test_counts_are_added_and_compared_whatever_has_them() -> None:
    totals = counts_of(pb.Totals(prompt_tokens=10, cached_tokens=4, output_tokens=1))
    totals.add(TokenCounts(20, 16, 2))
    assert (totals, totals.computed_tokens) == (TokenCounts(30, 20, 3), 10)
    assert totals.since(TokenCounts(10, 4, 1)) == TokenCounts(20, 16, 2)
