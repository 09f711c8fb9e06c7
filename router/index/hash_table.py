"""An open-addressing hash table from u64 keys to u32 values, as arrays and compiled loops over whole runs of keys.

A key's bucket is the high half of (SPREAD * key mod 2**64), scaled to the size of the table. A key whose bucket is
taken goes to the next free slot. Keys therefore lie nearly in the order of these products, and moving them to a larger
table reads and writes memory from front to back. Without SPREAD, keys that are not even over 64 bits, such as hashes of
63 bits from elsewhere, would crowd a part of the table.

While keys move from an old table to a new one, both are searched. Invariants, kept by block_index.py: keys are above
GONE, each is in one of the two tables, both tables have an empty slot.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.compiled import HASHES, U64, compiled, inlined

EMPTY = U64(0)
GONE = U64(1)
"""Marks a slot of an old table whose key has left: searches go on behind it. In a new table gaps are closed instead."""

SPREAD = U64(0x9E3779B97F4A7C15)
"""2**64 over the golden ratio, odd: Knuth's multiplicative hashing (The Art of Computer Programming 3, 6.4)."""

AHEAD = 128
"""Number of keys whose buckets are read before the keys are searched."""

Keys = NDArray[np.uint64]
Values = NDArray[np.uint32]

_TABLE = "uint64[::1], uint32[::1]"
_ZERO, _ONE, _SHIFT_32 = U64(0), U64(1), U64(32)


@inlined
def _bucket(key: np.uint64, size: np.uint64) -> np.uint64:
    return (key * SPREAD >> _SHIFT_32) * size >> _SHIFT_32


@inlined
def _search(table: Keys, key: np.uint64) -> tuple[bool, np.uint64]:
    """(True, the key's slot), or (False, the empty slot where it would go)."""
    size = U64(len(table))
    slot = _bucket(key, size)
    while table[slot] != key:
        if table[slot] == EMPTY:
            return False, slot
        slot += _ONE
        if slot == size:
            slot = _ZERO
    return True, slot


@inlined
def _read_ahead(table: Keys, keys: Keys, first: int, last: int) -> np.uint64:
    """Reads the buckets of keys [first, last), so that memory fetches them side by side, not one after the other."""
    size = U64(len(table))
    seen = EMPTY
    for i in range(first, last):
        seen |= table[_bucket(keys[i], size)]
    return seen


@inlined
def _close_gap(table: Keys, values: Values, gap: np.uint64) -> None:
    """Empties a slot: keys behind it move up when that brings them nearer to their buckets."""
    size = U64(len(table))
    slot = gap
    while True:
        slot += _ONE
        if slot == size:
            slot = _ZERO
        key = table[slot]
        if key == EMPTY:
            break
        bucket = _bucket(key, size)
        from_bucket = slot - bucket if slot >= bucket else slot + size - bucket
        from_gap = slot - gap if slot >= gap else slot + size - gap
        if from_bucket >= from_gap:
            table[gap], values[gap] = key, values[slot]
            gap = slot
    table[gap] = EMPTY


@compiled(f"uint32({_TABLE}, uint64)")
def get(table: Keys, values: Values, key: np.uint64) -> np.uint32:
    """The value of a key in one table; 0 when the table lacks it or it is not above GONE."""
    known, slot = _search(table, key)
    value: np.uint32 = values[slot]
    return value if known and key > GONE else np.uint32(0)


@compiled(f"int64({_TABLE}, {_TABLE}, uint64, {HASHES}, uint32)")
def insert(
    table: Keys, values: Values, old_table: Keys, old_values: Values, moved: np.uint64, keys: Keys, value: np.uint32
) -> int:
    """Stops before the first key that is known already or not above GONE. Returns how many keys were inserted.

    A key whose old slot is not among the first `moved` still goes to the old table. The new table is therefore written
    from front to back, and the system finds memory for it little by little.
    """
    for first in range(0, len(keys), AHEAD):
        last = min(first + AHEAD, len(keys))
        if _read_ahead(table, keys, first, last) == GONE:  # always False; it keeps the compiler from dropping the reads
            break
        for i in range(first, last):
            key = keys[i]
            in_old, old_slot = _search(old_table, key)
            known, slot = _search(table, key)
            if known or in_old or key <= GONE:
                return i
            if old_slot >= moved:
                old_table[old_slot], old_values[old_slot] = key, value
            else:
                table[slot], values[slot] = key, value
    return len(keys)


@compiled(f"int64({_TABLE}, {_TABLE}, {HASHES}, uint32)")
def assign(table: Keys, values: Values, old_table: Keys, old_values: Values, keys: Keys, value: np.uint32) -> int:
    """Gives known keys another value. Returns how many were unknown."""
    missing = 0
    for key in keys:
        known, slot = _search(table, key)
        if known:
            values[slot] = value
            continue
        known, slot = _search(old_table, key)
        if known:
            old_values[slot] = value
        else:
            missing += 1
    return missing


@compiled(f"int64({_TABLE}, uint64[::1], {HASHES})")
def remove(table: Keys, values: Values, old_table: Keys, keys: Keys) -> int:
    """Takes out known keys. Returns how many were unknown."""
    missing = 0
    for first in range(0, len(keys), AHEAD):
        last = min(first + AHEAD, len(keys))
        if _read_ahead(table, keys, first, last) == GONE:  # always False; it keeps the compiler from dropping the reads
            break
        for i in range(first, last):
            known, slot = _search(table, keys[i])
            if known:
                _close_gap(table, values, slot)
                continue
            known, slot = _search(old_table, keys[i])
            if known:
                old_table[slot] = GONE
            else:
                missing += 1
    return missing


@compiled(f"void({_TABLE}, {_TABLE}, int64, int64)")
def move(table: Keys, values: Values, old_table: Keys, old_values: Values, first: int, last: int) -> None:
    """Moves the keys in slots [first, last) of the old table to the new one."""
    for slot in range(first, last):
        key = old_table[slot]
        if key > GONE:
            _, to = _search(table, key)
            table[to], values[to] = key, old_values[slot]
            old_table[slot] = GONE
