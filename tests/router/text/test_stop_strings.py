from hypothesis import example, given, strategies as st

from router.text.stop_strings import StopStrings

LETTERS = "ab€"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4).map(tuple)


def run(stop: tuple[str, ...], pieces: list[str], included: bool) -> tuple[str, bool]:
    strings = StopStrings(stop, included)
    shown = ""
    for piece in pieces:
        text, stopped = strings.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + strings.flush(), False


def oracle(stop: tuple[str, ...], text: str, included: bool) -> tuple[str, bool]:
    """Reads character by character and looks back."""
    for end in range(len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end if included else end - max(map(len, complete))], True
    return text, False


@given(STOPS, st.lists(st.text(LETTERS, max_size=4), max_size=20), st.booleans())
@example(("abab€",), ["ab", "abab€"], False)
@example(("b",), ["abab"], False)
@example(("aba", "b"), ["aba"], True)
def test_the_text_ends_before_the_first_complete_stop_string_or_with_it_however_it_is_cut(
    stop: tuple[str, ...], pieces: list[str], included: bool
) -> None:
    assert run(stop, pieces, included) == oracle(stop, "".join(pieces), included)


@given(STOPS, st.text(LETTERS, max_size=30))
def test_exactly_what_may_begin_a_stop_string_is_held_back(stop: tuple[str, ...], text: str) -> None:
    strings = StopStrings(stop)
    shown = ""
    for count, character in enumerate(text, start=1):
        more, stopped = strings.push(character)
        shown += more
        if stopped:
            return
        ends = [text[count - n : count] for n in range(count + 1)]
        held = max(len(end) for end in ends if end == "" or any(s.startswith(end) for s in stop))
        assert shown == text[: count - held]


def test_without_stop_strings_all_text_is_shown_at_once() -> None:
    assert StopStrings(()).push("all of it") == ("all of it", False)


def test_what_has_ended_the_text_is_told_and_until_then_nothing() -> None:
    strings = StopStrings(("ab", "b!", "c"))
    assert strings.push("xa!") == ("xa!", False)
    assert strings.found is None
    assert strings.push("b!c") == ("", True)
    assert strings.found == "b!"


def test_nothing_is_held_back_once_the_text_has_ended() -> None:
    strings = StopStrings(("abb", "bc"))
    assert strings.push("xab") == ("x", False)
    assert strings.push("c") == ("a", True)
    assert strings.flush() == ""
