"""What is shown of a prompt: parts that are small, and add up to the whole."""

import numpy as np
import pytest

from baton_proto.sampling import MAX_PROMPT_LOGPROBS, PromptLogprobs, SamplingParams
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import MAJOR, FirstToken, encode
from kvtransfer.wire.framing import MAX_PAYLOAD_BYTES
from router.api.openai.shown_prompt import JsonLists, PromptWish, ShownPrompt
from router.api.wishes.prompt_logprobs import ROW_COST, VALUES_AT_ONCE, check_prompt, rows_in_parts
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError
from tests.tiny_model import VOCAB_SIZE


def made_up(num_rows: int, num_top: int) -> PromptLogprobs:
    values = np.linspace(-9, 0, num_rows, dtype="<f4")
    ids = np.arange(num_rows * num_top, dtype="<u4") % VOCAB_SIZE
    tops = np.linspace(-1, 0, num_rows * num_top, dtype="<f4")
    return PromptLogprobs(num_top, *(each.tobytes() for each in (values, np.ones(num_rows, "<u4"), ids, tops)))


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_parts_are_small_and_add_up(num_top: int) -> None:
    prompt = np.arange(5000, dtype=np.uint32) % VOCAB_SIZE
    found = made_up(4999, num_top)
    parts = list(rows_in_parts(prompt, found))
    assert max(len(part) * (ROW_COST + num_top) for part in parts) <= VALUES_AT_ONCE
    rows = [row for part in parts for row in part]
    assert [row.token_id for row in rows] == prompt.tolist()
    assert rows[0].logprob is None
    assert [row.logprob for row in rows[1:]] == np.frombuffer(found.logprobs, "<f4").tolist()
    assert [pair[0] for row in rows for pair in row.top] == np.frombuffer(found.top_ids, "<u4").tolist()


def test_the_largest_that_may_be_asked_for_fits_a_commit() -> None:
    for num_top in (0, 1, 20):
        num_tokens = MAX_PROMPT_LOGPROBS // (1 + num_top)
        check_prompt("logprobs", num_tokens, SamplingParams(1, prompt_logprobs=num_top))
        first = FirstToken(MAJOR, 1, None, TokenCounts(), prompt_logprobs=made_up(num_tokens - 1, num_top))
        assert len(encode(first)) < MAX_PAYLOAD_BYTES - 64 * 1024
    with pytest.raises(InvalidRequestError, match=r"^logprobs: asks for 100002 values: 50001 prompt tokens with 1 alt"):
        check_prompt("logprobs", 50001, SamplingParams(1, prompt_logprobs=1))


@pytest.mark.parametrize("given", [True, False], ids=["text", "tokens"])
def test_a_long_echo_comes_in_parts_whose_texts_are_the_prompt(tokenizer: Tokenizer, given: bool) -> None:
    text = "What ça 😀 is? " * 500
    tokens = tokenizer.encode(text)
    shown = ShownPrompt(tokenizer, tokens, text if given else None, PromptWish(echo=True))
    parts = list(shown.parts(None))
    assert len(parts) > 3
    assert "".join(part.text for part in parts) == text


@pytest.mark.parametrize("text", ["What is?", None], ids=["text", "tokens"])
def test_a_prompt_of_which_details_alone_are_wanted_is_not_part_of_the_text(
    tokenizer: Tokenizer, text: str | None
) -> None:
    tokens = tokenizer.encode("What is?")
    shown = ShownPrompt(tokenizer, tokens, text, PromptWish(details=1))
    parts = list(shown.parts(made_up(len(tokens) - 1, 1)))
    assert sum(len(part.details) for part in parts) == len(tokens)
    assert "".join(part.text for part in parts) == ""
    assert shown.end == 0


def test_a_character_that_the_prompt_leaves_unfinished_is_shown_as_such(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀")[:-1]
    shown = ShownPrompt(tokenizer, tokens, None, PromptWish(echo=True))
    assert "".join(part.text for part in shown.parts(None)) == "a\ufffd"


def test_lists_grow_part_by_part() -> None:
    lists = JsonLists()
    assert bytes(lists.whole("none")) == b"[]"
    for part in ([None, 1.5], [], ["x"]):
        lists.add("a", part)
    assert bytes(lists.whole("a")) == b'[null,1.5,"x"]'
