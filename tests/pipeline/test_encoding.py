"""Token ids are exactly those of tiktoken, whatever the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from pipeline import encoding
from pipeline.books.readers import Part, RawBook, read_books
from pipeline.books.sources import find
from pipeline.config import TokenizeConfig
from pipeline.encoding import EncodingMismatch, chunks, decode, encode, reference, verify

ODD_SPACES = "\t\n\v\f\r\x1c\x1d\x85\u00a0\u1680\u180e\u2000\u2028\u2029\u202f\u205f\u3000\u200b\ufeff "
texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from(ODD_SPACES + "'sdtmlvre<|endoftext|>0123456789 \n"),
    )
)


@settings(max_examples=2000, deadline=None)
@given(texts)
def test_ids_equal_tiktoken_and_decode_to_the_text(text: str) -> None:
    ids = encode(text.encode())
    assert ids.tolist() == reference().encode_ordinary(text)
    assert decode(ids) == text


# What is a letter or digit since Unicode 17 and was unassigned before (UnicodeData.txt of 16.0 and 17.0 compared).
NEWEST = (
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
)  # fmt: skip


def test_letters_of_a_newer_unicode_than_one_encoder_knows_have_the_ids_of_tiktoken() -> None:
    for first, last in NEWEST:
        for letter in map(chr, range(first, last + 1)):
            text = f"x{letter}x 1{letter}{letter}1 \u6000{letter}\u6000 !{letter}!"
            assert encode(text.encode()).tolist() == reference().encode_ordinary(text), hex(ord(letter))


def test_every_character_of_the_basic_plane_has_the_ids_of_tiktoken() -> None:
    for letter in map(chr, (*range(0xD800), *range(0xE000, 0x10000))):
        text = f"x{letter}x 1{letter} !{letter}!"
        assert encode(text.encode()).tolist() == reference().encode_ordinary(text), hex(ord(letter))


def test_the_sample_has_the_ids_of_tiktoken() -> None:
    books = list(read_books(Part(find(["sample"]).files[0], 0), TokenizeConfig()))
    assert len(books) == 66
    for book in books:
        assert isinstance(book, RawBook)
        assert np.array_equal(encode(book.data), encode(book.data, "tiktoken")), book.id


def test_a_special_token_in_a_book_is_ordinary_text() -> None:
    text = b"before<|endoftext|>after"
    assert 50256 not in encode(text)
    assert encode(text).tolist() == encode(text, "tiktoken").tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["word", " ", "\n", "a b", "'s", "é", "1 2", "."]), max_size=200), st.integers(1, 40))
def test_text_may_be_encoded_in_chunks(parts: list[str], size: int) -> None:
    text = "".join(parts).encode()
    pieces = list(chunks(text, size))
    assert b"".join(pieces) == text
    assert [i for piece in pieces for i in encode(piece).tolist()] == encode(text).tolist()


def test_one_differing_id_names_the_book() -> None:
    text = b"It was the best of times, it was the worst of times."
    ids = encode(text)
    assert verify("Dickens", text, ids) == len(text)
    ids[3] += 1
    with pytest.raises(EncodingMismatch, match=r"Dickens.*token 3"):
        verify("Dickens", text, ids)


def test_another_vocabulary_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered = tmp_path / "gpt2.tiktoken"
    altered.write_bytes(encoding.VOCABULARY.read_bytes()[:-2])
    monkeypatch.setattr(encoding, "VOCABULARY", altered)
    with pytest.raises(UserError, match="not GPT-2's vocabulary"):
        encoding.vocabulary()


def test_a_text_longer_than_a_chunk_is_encoded_to_its_end() -> None:
    line = b"It was a quiet morning on the harbour road.\n"
    once = encode(line * 1000)
    ids = encode(line * (encoding.CHUNK // len(line) // 1000 + 1) * 1000)
    assert np.array_equal(ids, np.tile(once, len(ids) // len(once)))


def test_the_beginning_of_a_long_book_and_all_of_a_short_one_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"It was the best of times, it was the worst of times."
    ids = encode(text)
    with pytest.raises(EncodingMismatch, match=f"from token {len(ids)} on"):
        verify("Dickens", text, np.append(ids, ids[-1:]))
    with pytest.raises(EncodingMismatch, match=f"from token {len(ids) - 1} on"):
        verify("Dickens", text, ids[:-1])
    monkeypatch.setattr(encoding, "VERIFIED_BYTES", 20)
    ids[-1] += 1
    assert verify("Dickens", text, ids) == len("It was the best of times, it"), "up to the next blank between letters"
    ids[0] += 1
    with pytest.raises(EncodingMismatch, match="from token 0 on"):
        verify("Dickens", text, ids)
