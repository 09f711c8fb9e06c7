import msgspec
import pytest

from baton_proto.routers.left import MAJOR, NOTHING_READ, LeftAnswer, decode_left_answer, read_on
from baton_proto.version import VersionError
from worker.requests.left_answers import KEPT_S, MAX_TOKENS, LeftAnswers, is_of


def question(request_id: str, token_ids: list[int]) -> LeftAnswer:
    return LeftAnswer(MAJOR, request_id, len(token_ids), read_on(NOTHING_READ, token_ids))


def packed(token_ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in token_ids)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_tokens_of_an_answer_are_told_to_who_knows_their_checksum() -> None:
    left = LeftAnswers()
    left.keep("r/0.1", [5, 6, 7])
    left.keep("r-1f/1.2", [5, 6, 8])
    assert left.find(question("r", [5, 6]), []) == packed([5, 6])
    assert left.find(question("r", [5, 6, 8]), []) == packed([5, 6, 8])
    for unknown in (question("r", [5, 7]), question("r", [5, 6, 7, 8]), question("q", [5, 6]), question("", [5])):
        assert left.find(unknown, []) is None


def test_an_answer_counts_as_left_before_its_router_is_known_to_be_gone() -> None:
    assert LeftAnswers().find(question("r", [1, 2]), [[1], [1, 2, 3]]) == packed([1, 2])


def test_answers_are_kept_for_a_while_and_the_oldest_make_room() -> None:
    clock = Clock()
    left = LeftAnswers(clock)
    left.keep("old/0.1", [1])
    clock.now_s += KEPT_S
    assert left.find(question("old", [1]), []) is not None
    clock.now_s += 1
    assert left.find(question("old", [1]), []) is None
    for name in "abc":
        left.keep(f"{name}/0.1", [ord(name)] * (MAX_TOKENS // 2))
    assert [left.find(question(name, [ord(name)]), []) is not None for name in "abc"] == [False, True, True]


def test_the_last_attempt_of_an_answer_replaces_an_earlier_one_of_the_same_name() -> None:
    left = LeftAnswers()
    for token in range(10_000):
        left.keep("r/0.1", [token] * 200)
    assert left.find(question("r", [9_999]), []) is not None
    assert left.find(question("r", [9_998]), []) is None


def test_a_worker_knows_a_request_by_its_id_with_an_ending() -> None:
    assert all(is_of(name, "a") for name in ("a/0.1", "a-0f/3.2", "a-0f-7/0.1"))
    assert not any(is_of(name, "a") for name in ("ab/0.1", "b-a/0.1", "a", "/a"))


def test_a_question_of_another_version_is_refused() -> None:
    other = msgspec.structs.replace(question("r", [1]), version=MAJOR + 1)
    with pytest.raises(VersionError):
        decode_left_answer(msgspec.msgpack.encode(other))
