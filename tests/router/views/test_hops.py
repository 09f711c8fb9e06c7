"""The rows of a request's timeline."""

from hypothesis import given, strategies as st

from baton_proto.timeline import PromptChunk, PushedChunk, Timeline
from router.counters.recent import Attempt, RecentRequest, Service
from router.views.hops import hops

micros = st.integers(0, 5_000_000)
chunks = st.lists(st.builds(PromptChunk, micros, micros, st.just(16)), max_size=3)
pushes = st.lists(st.builds(PushedChunk, micros, micros, micros, st.just(4096), st.just(2)), max_size=3)
timelines = st.builds(Timeline, micros, micros, micros, micros, chunks, pushes)


@given(timelines, st.floats(0.0, 1.0), st.floats(0.0, 4.0), st.floats(0.0, 4.0))
def test_a_hop_lies_in_its_parent_whatever_a_worker_says(
    timeline: Timeline, placed_s: float, first_s: float, decoded_s: float
) -> None:
    attempt = Attempt(1, 0.0, 0, placed_s=placed_s, prefill_worker="prefill-1", decode_worker="decode-1")
    attempt.first_s = placed_s + first_s
    attempt.ended_s, attempt.timeline = attempt.first_s + decoded_s, timeline
    request = RecentRequest("r", 48, 0.0, [Service(0)], ended_s=attempt.ended_s)
    request.choices[0].tried.append(attempt)
    parents = []
    for hop in hops(request, attempt.ended_s):
        del parents[hop.depth :]
        assert hop.began_s <= hop.ended_s
        if parents:
            assert parents[-1].began_s <= hop.began_s
            assert hop.ended_s <= parents[-1].ended_s
        parents.append(hop)
    assert parents[0].name == "attempt"
