"""A server whose events are another one's is told from one whose events are late, or cannot be followed."""

from engine.vllm.server.told_blocks import IN_A_ROW, WAIT_S, ToldBlocks


def test_events_of_another_server_are_noted_after_several_prompts_and_never_after_one() -> None:
    held = {99}
    told = ToldBlocks(held)
    for number in range(IN_A_ROW):
        assert told.note == ""
        told.computed(number, float(number))
        told.computed(number, 1000.0)  # the same prompt again
        told.look(number + WAIT_S, is_blind=False)
    assert "may be another server's" in told.note
    told.computed(50, 100.0)
    held.add(50)
    told.look(101.0, is_blind=False)
    assert told.note == "", "they are its own after all"


def test_where_events_cannot_be_followed_nothing_is_late() -> None:
    told = ToldBlocks(set())
    for number in range(3 * IN_A_ROW):
        told.computed(number, 0.0)
        told.look(WAIT_S, is_blind=number % IN_A_ROW == 2)
    assert told.note == ""
