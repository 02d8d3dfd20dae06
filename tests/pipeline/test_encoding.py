"""Token ids are exactly those of tiktoken, whatever the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.command import UserError
from pipeline import encoding
from pipeline.config import TokenizeConfig
from pipeline.encoding import EncodingMismatch, chunks, decode, encode, reference, verify
from pipeline.reading import Part, RawBook, read_books
from pipeline.sources import find

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
