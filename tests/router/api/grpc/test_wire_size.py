from typing import Any

from hypothesis import given, settings, strategies as st

from baton_proto.generated import inference_pb2 as pb
from router.api.grpc.wire_size import PACKED_PER_FIELD, num_fields

KIND = pb.GenerateRequest.DESCRIPTOR
NO_LIMIT = 10**9

words = st.text(max_size=200)
counts = st.integers(0, 2**32 - 1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(words, words), max_size=20), st.lists(words, max_size=20), st.lists(counts, max_size=99), words
)
def test_every_field_is_counted(chat: list[tuple[str, str]], stop: list[str], ids: list[int], model: str) -> None:
    sampling = pb.SamplingOptions(stop=stop, stop_token_ids=ids, temperature=0.5, seed=2**63)
    messages = [pb.ChatMessage(role=role, content=content) for role, content in chat]
    request = pb.GenerateRequest(model=model, chat=pb.ChatMessages(messages=messages), sampling=sampling)
    inside = sum(1 + bool(role) + bool(content) for role, content in chat)
    wanted = bool(model) + 1 + inside + 1 + len(stop) + (1 + len(ids) // PACKED_PER_FIELD if ids else 0) + 2
    assert num_fields(request.SerializeToString(), KIND, NO_LIMIT) == wanted


def test_counting_ends_at_the_limit() -> None:
    empty_stop_strings = b"\x2a\x02\x5a\x00" * 100_000
    assert 10 < num_fields(empty_stop_strings, KIND, 10) < 20


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_what_is_no_message_is_counted_to_its_end(data: bytes) -> None:
    assert num_fields(data, KIND, NO_LIMIT) <= 2 * len(data)


def test_numbers_without_end_are_no_work() -> None:
    endless: Any = b"\x38" + b"\xff" * 1_000_000
    assert num_fields(endless, KIND, NO_LIMIT) == 1
