import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as LibraryTokenizer, decoders, models

from router.text import tokenizer as text
from router.text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, make_detokenizer
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.model_files import resolve_model
from tests.router.scripted_generator import tiny_tokenizer
from tests.tiny_model import VOCAB_SIZE

WORDS = ["▁", "▁the", "▁a", "b", "é", "▁€", "\ufffd", "▁▁", "."]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = make_detokenizer(tokenizer)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.flush()]


def write_tokenizer(folder: Path, vocabulary: list[str], decoder: decoders.Decoder, **options: object) -> Tokenizer:
    library = LibraryTokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[], unk_token="<unk>", **options)
    )
    library.decoder = decoder
    library.add_special_tokens([AddedToken("<s>", special=True)])
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder, len(vocabulary))


@pytest.fixture(scope="module")
def byte_level(tiny_model: Path) -> Tokenizer:
    return tiny_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Decodes as Llama 2 does."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    vocabulary = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    folder = tmp_path_factory.mktemp("byte-fallback")
    return write_tokenizer(folder, vocabulary, decoders.Sequence(steps), byte_fallback=True)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    files = resolve_model("smollm2")
    return Tokenizer(files.folder, files.config.vocab_size)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_tokenizer(tmp_path_factory.mktemp("metaspace"), ["<unk>", "<s>", *WORDS], decoders.Metaspace())


def test_the_kind_of_detokenizer_follows_the_decoder(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    assert isinstance(make_detokenizer(byte_level), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(byte_fallback), WindowDetokenizer)


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=40))
def test_byte_level_pieces_add_up_to_the_decoded_whole(byte_level: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(pieces(byte_level, token_ids)) == byte_level.decode(token_ids)


@given(text=st.text(max_size=30))
def test_no_character_is_split_or_late(byte_level: Tokenizer, text: str) -> None:
    token_ids = [int(token_id) for token_id in byte_level.encode(text)]
    spelled = b""
    shown = ""
    for token_id, piece in zip(token_ids, pieces(byte_level, token_ids), strict=False):
        spelled += byte_level.token_bytes(token_id)
        shown += piece
        assert shown == spelled.decode(errors="ignore")  # whatever is complete, and nothing else


@given(data=st.data())
def test_byte_fallback_pieces_add_up_to_the_decoded_whole(byte_fallback: Tokenizer, data: st.DataObject) -> None:
    parts = st.one_of(
        st.integers(0, byte_fallback.vocab_size - 1).map(lambda token_id: [token_id]),
        st.characters(codec="utf-8").map(lambda character: [2 + byte for byte in character.encode()]),
        st.integers(258, byte_fallback.vocab_size - 1).map(lambda token_id: [token_id]),
    )
    token_ids = [token_id for part in data.draw(st.lists(parts, max_size=20)) for token_id in part]
    assert "".join(pieces(byte_fallback, token_ids)) == byte_fallback.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "smollm2"])
@given(seed=st.integers(0, 2**32), special=st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_long_is_decoded_without_the_lock_into_the_same_text(
    kind: str, seed: int, special: bool, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    dice = random.Random(seed)
    token_ids = [dice.randrange(tokenizer.vocab_size) for _ in range(dice.randrange(60))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "MAX_LOCKED_TOKENS", 60)
        at_once = tokenizer.decode(token_ids, special)
        patch.setattr(text, "MAX_LOCKED_TOKENS", -1)
        patch.setattr(tokenizer, "_tokenizer", _Unlocked(tokenizer._tokenizer))
        assert tokenizer.decode(token_ids, special) == at_once


class _Unlocked:
    """A tokenizer of the library whose `decode` must not be called."""

    def __init__(self, library: LibraryTokenizer) -> None:
        self.decode_batch = library.decode_batch


@given(token_ids=st.lists(st.integers(0, len(WORDS) + 1), max_size=30))
def test_spaces_of_words_survive_the_window(metaspace: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(pieces(metaspace, token_ids)) == metaspace.decode(token_ids)


def test_a_run_of_byte_tokens_is_shown_when_it_ends(byte_fallback: Tokenizer) -> None:
    euro = [2 + byte for byte in "€".encode()]
    the = 258 + WORDS.index("▁the")
    assert pieces(byte_fallback, [the, *euro, the]) == ["the", "", "", "", "€ the", ""]


def test_half_a_character_at_the_end_becomes_a_replacement_character(byte_level: Tokenizer) -> None:
    euro = [int(token_id) for token_id in byte_level.encode("€")]
    assert len(euro) == 3
    assert pieces(byte_level, euro[:2]) == ["", "", "\ufffd"]


def test_special_tokens_have_no_text(byte_level: Tokenizer) -> None:
    assert pieces(byte_level, [0, 1, 2]) == ["", "", "", ""]


def test_a_cut_character_is_told(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    fox = "\U0001f98a"
    spelled = byte_level.encode(fox, add_special_tokens=False).tolist()
    for tokenizer, token_ids in ((byte_level, spelled), (byte_fallback, [2 + byte for byte in fox.encode()])):
        detokenizer = make_detokenizer(tokenizer)
        told = [detokenizer.mid_character]
        for token_id in token_ids:
            detokenizer.push([token_id])
            told.append(detokenizer.mid_character)
        assert told == [False, *[True] * (len(token_ids) - 1), False]
