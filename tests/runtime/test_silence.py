"""How long a process counts as silent."""

from runtime.silence import Silence


def test_a_process_that_was_heard_just_before_a_look_is_not_silent_before_the_limit_is_over() -> None:
    silence = Silence(look_s=0.5, limit_s=2.0, pid=None)
    for _ in range(2):
        assert [silence.look() for _ in range(5)] == [False, False, False, False, True]
        silence.heard()
