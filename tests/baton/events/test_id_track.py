"""Which batch ids were seen: against a set that remembers all of them."""

from hypothesis import given, strategies as st

from baton.events.id_track import IdTrack


@given(st.lists(st.integers(1, 30)))
def test_missing_ids_are_those_between_the_first_and_the_last_that_were_not_seen(ids: list[int]) -> None:
    track, seen = IdTrack(), set[int]()
    first = ids[0] if ids else 0
    for event_id in ids:
        if event_id < first:
            continue  # what came before the first one that we saw is not our matter
        assert track.observe(event_id) == (event_id not in seen)
        seen.add(event_id)
    missing = {event_id for hole in track.missing for event_id in hole}
    assert missing == set(range(first, max(seen, default=0))) - seen
    assert track.last == max(seen, default=0)
