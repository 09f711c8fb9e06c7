"""Messages of a type with whatever values their fields allow, and bytes that are almost such messages."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

INT64 = 2**63 - 1
WORDS = ("", "decode-0", "prefill-0", "transfer", "shm", "tcp", "ready", "events", "\x00", "é" * 9, "x" * 300)


def messages(types: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Of any of the message types. `given`: the values of fields of that name, most of the time."""
    return _values(inspect.type_info(types), given)


def almost(encoded: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Mostly as they are; cut, or with some bytes replaced."""
    place = st.integers(0, 200)
    cut = st.builds(lambda data, at: data[: at % (len(data) + 1)], encoded, place)
    changed = st.builds(
        lambda data, at, new: data[: at % (len(data) + 1)] + new + data[at % (len(data) + 1) + len(new) :],
        encoded,
        place,
        st.binary(min_size=1, max_size=4),
    )
    return st.one_of(encoded, encoded, encoded, cut, changed, st.binary(max_size=60))


def _values(kind: inspect.Type, given: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    match kind:
        case inspect.IntType():
            low, high = kind.ge or 0, INT64 if kind.le is None else kind.le
            return st.one_of(st.integers(0, 5), st.integers(low, high), st.sampled_from((low, high)))
        case inspect.FloatType():
            return st.one_of(st.sampled_from((0.0, 0.5, 1.0)), st.floats())
        case inspect.StrType():
            return st.sampled_from(
                WORDS if kind.max_length is None else [w for w in WORDS if len(w) <= kind.max_length]
            )
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of([_values(inner, given) for inner in kind.types])
        case inspect.ListType() | inspect.VarTupleType():
            return st.lists(_values(kind.item_type, given), max_size=4)
        case inspect.TupleType():
            return st.tuples(*(_values(inner, given) for inner in kind.item_types))
        case inspect.DictType():
            return st.dictionaries(_values(kind.key_type, given), _values(kind.value_type, given), max_size=3)
        case inspect.StructType():
            fields = {field.name: _field(field, given) for field in kind.fields}
            return st.builds(kind.cls, **fields)
    raise AssertionError(f"no values for {kind}")


def _field(field: inspect.Field, given: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    values = _values(field.type, given)
    return st.one_of(given[field.name], given[field.name], values) if field.name in given else values


def packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)
