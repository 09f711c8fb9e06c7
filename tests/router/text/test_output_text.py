import pytest
from hypothesis import given, strategies as st

from baton_proto.sampling import TokenLogprobs
from router.text.output_text import OutputText
from router.text.tokenizer import Tokenizer
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(token_id) for token_id in tokenizer.encode(text)]


def test_text_waits_for_whole_characters(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, ())
    first, second, third = ids(tokenizer, "€")
    assert text.push([first, second]) == (2, "", False)
    assert text.push([third]) == (1, "€", False)
    assert text.flush() == ""


def test_a_stop_string_drops_the_tokens_after_the_one_that_completes_it(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, ("42",))
    token_ids = ids(tokenizer, "It is 42, I say.")
    accepted, shown, stopped = text.push(token_ids)
    assert (shown, stopped) == ("It is ", True)
    assert tokenizer.decode(token_ids[:accepted]).startswith("It is 42")
    assert "42" not in tokenizer.decode(token_ids[: accepted - 1])
    assert text.flush() == ""
    assert text.push(token_ids) == (0, "", True)


def test_a_possible_stop_string_is_held_back_until_it_is_none(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, ("\n\nUser:",))
    assert text.push(ids(tokenizer, "Yes.\n"))[1] == "Yes."
    assert text.push(ids(tokenizer, "\nUs"))[1] == ""
    assert text.push(ids(tokenizer, "ual"))[1] == "\n\nUsual"
    assert text.push(ids(tokenizer, "\n"))[1] == ""
    assert text.flush() == "\n"


def test_stop_strings_before_min_tokens_are_not_seen(tokenizer: Tokenizer) -> None:
    token_ids = ids(tokenizer, "aXbXcX")
    text = OutputText(tokenizer, ("X",), min_tokens=len(ids(tokenizer, "aXb")))
    accepted, shown, stopped = text.push(token_ids)
    assert (shown, stopped) == ("aXb", True)
    assert tokenizer.decode(token_ids[:accepted]) == "aXbX"


def test_the_token_that_reaches_min_tokens_may_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, ("X",), min_tokens=len(ids(tokenizer, "aX")))
    assert text.push(ids(tokenizer, "aX"))[1:] == ("a", True)


@pytest.mark.parametrize("stop", [(), ("two",)])
def test_a_step_without_tokens_changes_nothing(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    text = OutputText(tokenizer, stop)
    assert text.push([]) == (0, "", False)
    assert text.push(ids(tokenizer, "Hi"))[1] + text.flush() == "Hi"


def test_an_end_token_is_accepted_without_text(tokenizer: Tokenizer) -> None:
    text = OutputText(tokenizer, ())
    token_ids = [*ids(tokenizer, "Hi"), EOS_TOKEN_IDS[0]]
    assert text.push(token_ids, EOS_TOKEN_IDS[0]) == (len(token_ids), "Hi", False)


@pytest.mark.parametrize("stop", [(), ("two",)])
def test_special_tokens_are_spelled_out_where_they_are_marks(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    end = EOS_TOKEN_IDS[0]
    token_ids = [*ids(tokenizer, "Hi"), end, *ids(tokenizer, "!")]
    without, spelled = OutputText(tokenizer, stop), OutputText(tokenizer, stop, marks={end})
    assert without.push(token_ids)[1] + without.flush() == "Hi!"
    assert spelled.push(token_ids)[1] + spelled.flush() == f"Hi{tokenizer.token_bytes(end).decode()}!"


@pytest.mark.parametrize("stop", [(), ("two",)])
def test_a_stop_token_that_is_a_word_is_in_the_text_only_where_that_is_wanted(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    token_ids = ids(tokenizer, "one. one.")
    text = OutputText(tokenizer, stop)
    accepted, shown, _ = text.push(token_ids, stop_token=token_ids[-1])
    assert accepted == len(token_ids)
    assert shown + text.flush() == "one. one"
    included = OutputText(tokenizer, stop, includes_stop=True)
    assert included.push(token_ids, stop_token=token_ids[-1])[1] + included.flush() == "one. one."


@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    stop=st.lists(st.text("aeu \ufffd", min_size=1, max_size=2), max_size=2).map(tuple),
)
def test_text_and_accepted_tokens_do_not_depend_on_how_steps_are_cut(
    tokenizer: Tokenizer, token_ids: list[int], cuts: list[int], stop: tuple[str, ...]
) -> None:
    def run(sizes: list[int]) -> tuple[list[int], str, bool]:
        text, accepted, shown, position = OutputText(tokenizer, stop), [], "", 0
        stopped = False
        for size in sizes:
            count, more, stopped = text.push(token_ids[position : position + size])
            accepted += token_ids[position : position + count]
            shown += more
            position += size
        return accepted, shown + text.flush(), stopped

    assert run(cuts) == run([1] * len(token_ids)) == run([len(token_ids)])
    accepted, shown, stopped = run(cuts)
    whole = tokenizer.decode(token_ids)
    assert whole.startswith(shown)
    if not stopped:
        assert accepted == token_ids


def test_an_engines_news_keep_what_is_accepted(tokenizer: Tokenizer) -> None:
    first, second, third = TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, []), TokenLogprobs(-3.0, [])
    text, token_ids, logprobs = OutputText(tokenizer, ("b",)), ids(tokenizer, "aXbXc")[:3], [first, second, third]
    assert len(token_ids) == 3
    assert text.take(token_ids, logprobs, "length", None) == ("aX", "stop")
    assert len(token_ids) == len(logprobs) == 3
    plain, token_ids, logprobs = OutputText(tokenizer, ("X",)), ids(tokenizer, "aXb"), [first, second, third]
    assert plain.take(token_ids, logprobs, None, None) == ("a", "stop")
    assert (tokenizer.decode(token_ids), logprobs) == ("aX", [first, second])
    held = OutputText(tokenizer, ("ab!",))
    assert held.take(ids(tokenizer, "xa"), [], None, None) == ("x", None)
    assert held.take(ids(tokenizer, "b"), [], "length", None) == ("ab", "length")
    token_ids = ids(tokenizer, "one.")
    assert OutputText(tokenizer, ()).take(token_ids, [], "stop", token_ids[-1]) == ("one", "stop")
    assert token_ids == ids(tokenizer, "one.")
