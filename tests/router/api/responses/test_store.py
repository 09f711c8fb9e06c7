from router.api.responses.store import LEAST_BYTES, Conversation, ResponseStore
from tests.clock import Clock

CONVERSATION = Conversation([{"role": "user", "content": "a"}], 0, 500)


def put(store: ResponseStore, *ids: str, tenant: str = "a", chars: int = 0) -> None:
    for response_id in ids:
        store.begin(response_id, tenant, CONVERSATION)
        store.finish(response_id, Conversation(), b"x" * max(1, chars))


def held(store: ResponseStore, *ids: str, tenant: str = "a") -> list[bool]:
    return [store.get(response_id, tenant) is not None for response_id in ids]


def test_a_response_is_kept_for_its_time() -> None:
    clock = Clock(100.0)
    store = ResponseStore(1 << 20, 10.0, clock)
    put(store, "1")
    clock.now_s += 6
    put(store, "2")
    assert held(store, "1", "2") == [True, True]
    clock.now_s += 4
    assert held(store, "1", "2") == [False, True]
    clock.now_s += 6
    assert held(store, "2") == [False]
    assert store.num_bytes == 0


def test_the_tenant_that_has_most_makes_room_with_its_oldest() -> None:
    store = ResponseStore(4 * LEAST_BYTES, 10.0)
    put(store, "b1", tenant="b")
    put(store, "1", "2", "3", "4")
    assert held(store, "b1", tenant="b") == [True]
    assert held(store, "1", "2", "3", "4") == [False, True, True, True]
    put(store, "b2", "b3", tenant="b")
    assert held(store, "3", "4") == [True, True]
    assert store.num_bytes <= store.limit_bytes


def test_what_is_larger_than_the_store_is_not_kept_and_displaces_nothing() -> None:
    store = ResponseStore(2 * LEAST_BYTES, 10.0)
    put(store, "1")
    put(store, "2", chars=2 * LEAST_BYTES)
    assert held(store, "1", "2") == [True, False]
    store.begin("3", "a", Conversation([], 0, 2 * LEAST_BYTES + 1))
    store.finish("3", Conversation(), b"x")
    assert held(store, "1", "3") == [True, False]


def test_what_is_being_answered_counts_and_is_shown_to_nobody() -> None:
    store = ResponseStore(4 * LEAST_BYTES, 10.0)
    put(store, "1", "2")
    store.begin("3", "a", Conversation([], 0, 3 * LEAST_BYTES))
    assert held(store, "1", "2", "3") == [False, True, False]
    assert not store.delete("3", "a")
    assert store.num_bytes == 4 * LEAST_BYTES
    store.finish("3", Conversation([{"role": "assistant", "content": "b"}], 2, 100), b"body")
    stored = store.get("3", "a")
    assert stored is not None
    assert (len(stored.conversation.messages), stored.conversation.argument_chars) == (1, 2)
    assert store.num_bytes == stored.num_bytes == 3 * LEAST_BYTES + 104


def test_an_answer_that_fails_or_has_lost_its_place_leaves_nothing() -> None:
    store = ResponseStore(4 * LEAST_BYTES, 10.0)
    begun = store.begin("1", "a", CONVERSATION)
    store.forget_unanswered("1", begun)
    store.finish("1", CONVERSATION, b"body")
    assert (store.num_bytes, held(store, "1")) == (0, [False])
    begun = store.begin("2", "a", CONVERSATION)
    store.finish("2", CONVERSATION, b"body")
    store.forget_unanswered("2", begun)
    assert held(store, "2") == [True]


def test_a_response_that_is_answered_again_is_held_once_and_its_first_answer_forgets_nothing() -> None:
    store = ResponseStore(4 * LEAST_BYTES, 10.0)
    begun = store.begin("1", "a", CONVERSATION)
    store.begin("1", "a", CONVERSATION)
    store.forget_unanswered("1", begun)
    assert store.num_bytes == LEAST_BYTES
    store.finish("1", CONVERSATION, b"body")
    assert held(store, "1") == [True]


def test_a_response_is_its_tenants_alone() -> None:
    store = ResponseStore(1 << 20, 10.0)
    put(store, "1")
    assert held(store, "1", tenant="b") == [False]
    assert not store.delete("1", "b")
    assert store.delete("1", "a")
    assert not store.delete("1", "a")
    assert store.num_bytes == 0
