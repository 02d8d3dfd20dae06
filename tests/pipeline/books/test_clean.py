"""The text and the metadata of a cleaned book."""

import hashlib

import pytest

from pipeline.books.clean import Book, clean
from pipeline.books.readers import Dropped, RawBook

HEADER = (
    "Title: The Header's\nAuthor: Its Author\nLanguage: French\nRelease Date: May 9, 2008\n\n"
    "*** START OF THIS PROJECT GUTENBERG EBOOK ***\n\n"
)


def cleaned(data: bytes, **about: str) -> Book:
    book = clean(RawBook("books/a.txt", "books.zip", data, **about))
    assert isinstance(book, Book)
    return book


def test_a_book_is_described_by_its_cleaned_text() -> None:
    book = cleaned(("\ufeff\r\n" + HEADER + "Où est l’été?\r\nIci.\r\n\r\n").encode())
    assert book.text.decode() == "Où est l’été?\nIci.\n"
    assert book.chars == len("Où est l’été?\nIci.\n")
    assert book.sha256 == hashlib.sha256(book.text).hexdigest()
    assert (book.id, book.source) == ("books/a.txt", "books.zip")
    assert book.traits == ("gutenberg: start line", "line ends: CRLF")
    assert book.replaced == 0


@pytest.mark.parametrize("about", [{}, {"title": "The Table's", "author": "Another", "language": "de"}])
def test_metadata_of_the_source_precedes_that_of_the_header(about: dict[str, str]) -> None:
    book = cleaned((HEADER + "It began.\n").encode(), **about)
    expected = {"title": "The Header's", "author": "Its Author", "language": "French"} | about
    assert {name: getattr(book, name) for name in expected} == expected
    assert book.released == "May 9, 2008"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be"])
def test_zero_bytes_are_text_after_a_byte_order_mark(encoding: str) -> None:
    text = "It began.\n"
    assert cleaned(("\ufeff" * encoding.endswith("be") + text).encode(encoding)).text.decode() == text
    dropped = clean(RawBook("a", "a", text.encode("utf-16-le")))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "not text"


def test_damage_is_counted_and_named() -> None:
    book = cleaned("Où est l’été? ".encode() * 20 + b"\xff\n")
    assert book.replaced == 1
    assert book.traits == ("encoding: utf-8, damaged",)
