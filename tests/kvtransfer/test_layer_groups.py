"""Slabs whose layers with a window have blocks of their own: what is pushed lands in the layers that have it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvtransfer.decode_side.events import Committed
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.prefill_side.sending import Piece
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.copy_blocks import head_words
from kvtransfer.transports.host_window import HostWindow, StagedBlocks
from kvtransfer.transports.shm import ShmWriter
from tests.kvtransfer.peers import DECODE_IDENTITY, LAYOUT, PREFILL_IDENTITY, TIMEOUT_S, Decode, Prefill, patient

# The last layer that sees all is not the last one, and neighbours are of one group.
SLIDING = frozenset({0, 2, 3})
DECODE = replace(LAYOUT, window_layers=SLIDING, num_window_blocks=10)
PREFILL = replace(LAYOUT, num_blocks=48, window_layers=SLIDING, num_window_blocks=14)


def values(slab: Slab) -> list[np.ndarray]:
    """Of each layer, as bits."""
    return [layer.contiguous().view(torch.int32).numpy() for layer in slab.layers]


def fill(slab: Slab, seed: int) -> None:
    words = np.frombuffer(slab.buffer, dtype=np.uint32)
    words[:] = np.random.default_rng(seed).integers(1, 2**31, len(words), dtype=np.uint32)


class Sliding(Prefill):
    def __init__(self, transport: str, *, checksum: bool) -> None:
        self.slab = Slab(PREFILL)
        fill(self.slab, 1)
        config = patient(transport=transport, checksum=checksum)
        self.sender = Sender(self.slab, replace(PREFILL_IDENTITY, layout=PREFILL), config)


@contextmanager
def pair(transport: str, *, checksum: bool = False) -> Iterator[tuple[Decode, Sliding]]:
    decode = Decode(patient(transport=transport, checksum=checksum), replace(DECODE_IDENTITY, layout=DECODE))
    prefill = Sliding(transport, checksum=checksum)
    try:
        yield decode, prefill
    finally:
        prefill.close()
        decode.close()


def test_every_byte_of_a_slab_is_of_one_block_of_one_layer() -> None:
    for layout in (LAYOUT, DECODE, PREFILL):
        offsets = [
            layout.offset(layer, block) for layer in range(layout.num_layers) for block in layout.layer_blocks(layer)
        ]
        assert offsets == list(range(0, layout.nbytes, layout.block_bytes))
    assert (DECODE.last_layer, LAYOUT.last_layer) == (1, 3)
    assert DECODE.nbytes_of([0, 5, 32, 33, 41]) == (2 * 1 + 3 * 3) * DECODE.block_bytes
    assert replace(LAYOUT, window_layers=frozenset(range(4)), num_window_blocks=3).last_layer == 3


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("transport", ["shm", "shm at once", "tcp"])
def test_the_end_of_a_prompt_lands_in_layers_with_a_window_and_all_of_it_in_the_others(
    transport: str, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShmWriter, "at_once", transport == "shm at once")
    with pair(transport.split()[0], checksum=checksum) as (decode, prefill):
        fill(decode.slab, 2)
        expected = [layer.copy() for layer in values(decode.slab)]
        blocks, places = [9, 20, 21, 3], [32 + 7, 32 + 8]  # of the prompt; of its last two blocks
        source, source_places = [40, 3, 17, 41], [48 + 13, 48 + 1]
        for layer, (there, here) in enumerate(zip(expected, values(prefill.slab), strict=True)):
            if layer in SLIDING:
                there[[7, 8]] = here[[13, 1]]
            else:
                there[blocks] = here[source]
        grant = decode.receiver.reserve(blocks + places, 0, num_window_blocks=2)
        push, results = prefill.begin(grant)
        for pieces in (
            [Piece(push, 0, tuple(source[:3])), Piece(push, 4, (source_places[0],))],
            [Piece(push, 3, (source[3],)), Piece(push, 5, (source_places[1],))],
        ):
            layer_done = prefill.sender.ship(pieces)
            for layer in range(PREFILL.num_layers):
                layer_done(layer)
        push.commit(b"")
        result = results.get(timeout=TIMEOUT_S)
        assert (result.ok, result.kv_blocks, result.kv_bytes) == (True, 4, (4 + 2 * 3) * DECODE.block_bytes)
        committed = decode.wait_for(Committed, grant.transfer_id)
        assert (committed.kv_blocks, committed.kv_bytes) == (4, result.kv_bytes)
        assert all(np.array_equal(*each) for each in zip(values(decode.slab), expected, strict=True))
        assert decode.receiver.check_integrity() == []


def test_blocks_of_one_group_are_not_taken_for_a_layer_of_the_other() -> None:
    with pair("tcp") as (decode, prefill):
        before = [layer.copy() for layer in values(decode.slab)]
        grant = decode.receiver.reserve([9, 39], 0, num_window_blocks=1)
        push, results = prefill.begin(grant)
        push.layer_ready(0, 0, [48])
        push.commit(b"")
        assert not results.get(timeout=TIMEOUT_S).ok
        decode.wait_ended(grant.transfer_id)
        assert all(np.array_equal(*each) for each in zip(values(decode.slab), before, strict=True))


def test_a_push_without_what_layers_with_a_window_need_does_not_commit() -> None:
    with pair("shm") as (decode, prefill):
        grant = decode.receiver.reserve([9, 39], 0, num_window_blocks=1)
        push, results = prefill.begin(grant)
        push.layer_ready(1, 0, [40])
        push.commit(b"")
        result = results.get(timeout=TIMEOUT_S)
        assert (result.ok, "2 blocks missing" in result.reason or "3 blocks missing" in result.reason) == (False, True)


@pytest.mark.parametrize("layer", range(4))
def test_windows_onto_a_slab_and_its_words_are_those_of_the_layer(layer: int) -> None:
    slab = Slab(PREFILL)
    fill(slab, 3)
    first = PREFILL.layer_blocks(layer).start
    blocks, heads = [first + 7, first + 2], range(1, 2)
    expected = values(slab)[layer][[7, 2], 1:2].tobytes()
    assert b"".join(HostWindow(slab, heads).read(layer, blocks)) == expected
    assert bytes(StagedBlocks(slab, heads).read(layer, blocks, None)) == expected
    words = head_words(slab.flat.view(torch.uint8), PREFILL, heads, range(layer, layer + 1))
    assert words[0, [7, 2]].numpy().tobytes() == expected
    slab.clear_behind(first + 7, 5)
    cleared = [layer_values[7] for layer_values in values(slab)]
    assert not cleared[layer][:, :, 5:].any()
    assert cleared[layer][:, :, :5].all()
    assert all(cleared[one].all() for one in range(4) if (one in SLIDING) != (layer in SLIDING))
    slab.close()
