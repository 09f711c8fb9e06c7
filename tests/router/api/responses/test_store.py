from router.api.responses.store import BYTES_PER_OBJECT, LEAST_BYTES, ResponseStore

MESSAGES = [{"role": "user", "content": "a"}]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def put(store: ResponseStore, *ids: str, tenant: str = "a", chars: int = 0) -> None:
    for response_id in ids:
        store.put(response_id, tenant, MESSAGES, 0, b"x" * chars)


def held(store: ResponseStore, *ids: str, tenant: str = "a") -> list[bool]:
    return [store.get(response_id, tenant) is not None for response_id in ids]


def test_a_response_is_kept_for_its_time() -> None:
    clock = Clock()
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
    many = MESSAGES * (2 * LEAST_BYTES // BYTES_PER_OBJECT + 1)
    store.put("3", "a", many, 0, b"")
    store.put("4", "a", [{"role": "assistant", "content": "", "tool_calls": [{}]}], LEAST_BYTES, b"")
    assert held(store, "1", "3", "4") == [True, False, False]


def test_a_response_is_its_tenants_alone() -> None:
    store = ResponseStore(1 << 20, 10.0)
    put(store, "1")
    assert held(store, "1", tenant="b") == [False]
    assert not store.delete("1", "b")
    assert store.delete("1", "a")
    assert not store.delete("1", "a")
    assert store.num_bytes == 0
