"""The text and the metadata of a cleaned book."""

import base64
import hashlib
import time
from typing import Any

import pytest

from pipeline.books.cleaning import (
    ENCODING_GUESSED,
    ENCODING_OVERRULED,
    ENCODINGS_MIXED,
    SUSPECT_PREFIX,
    UNDECODABLE_BYTES,
    Book,
    clean,
)
from pipeline.books.readers import DroppedBook, RawBook

HEADER = (
    "Title: The Header's\nAuthor: Its Author\nLanguage: French\nRelease Date: May 9, 2008\n\n"
    "*** START OF THIS PROJECT GUTENBERG EBOOK ***\n\n"
)


def cleaned(data: bytes, **about: Any) -> Book:
    book = clean(RawBook("books/a.txt", "books.zip", data, **about))
    assert isinstance(book, Book)
    return book


def test_a_book_is_described_by_its_cleaned_text() -> None:
    book = cleaned(("\ufeff\r\n" + HEADER + "Où est l’été?\r\nIci.\r\n\r\n").encode())
    assert book.text.decode() == "Où est l’été?\nIci.\n"
    assert book.chars == len("Où est l’été?\nIci.\n")
    assert book.sha256 == hashlib.sha256(book.text).hexdigest()
    assert (book.id, book.source) == ("books/a.txt", "books.zip")
    assert book.labels == ("gutenberg: start line", "line ends: CRLF")
    assert book.replaced_bytes == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("blank", [b" ", b"\t", b"\n", b" \n"], ids=repr)
def test_blank_text_takes_time_in_proportion_to_its_length(blank: bytes) -> None:
    """A pattern that begins with two kinds of blanks tries every division of a megabyte between them: 10^12."""
    start = time.process_time()
    dropped = clean(RawBook("blank.txt", "", blank * 10**6))
    assert isinstance(dropped, DroppedBook)
    assert dropped.reason == "empty"
    assert time.process_time() - start < 3


@pytest.mark.parametrize("about", [{}, {"title": "The Table's", "author": "Another", "language": "de"}])
def test_metadata_of_the_source_precedes_that_of_the_header(about: dict[str, str]) -> None:
    book = cleaned((HEADER + "It began.\n").encode(), **about)
    expected = {"title": "The Header's", "author": "Its Author", "language": "French"} | about
    assert {name: getattr(book, name) for name in expected} == expected
    assert book.released == "May 9, 2008"


def test_zero_bytes_are_text_after_a_byte_order_mark() -> None:
    text = "It began.\n"
    for encoding in ("utf-16", "utf-32", "utf-16-be"):
        assert cleaned(("\ufeff" * encoding.endswith("be") + text).encode(encoding)).text.decode() == text
    dropped = clean(RawBook("a", "a", text.encode("utf-16-le")))
    assert isinstance(dropped, DroppedBook)
    assert dropped.reason == "not text"


def test_damage_is_counted_and_named() -> None:
    book = cleaned("Où est l’été? ".encode() * 20 + b"\xff\n")
    assert book.replaced_bytes == 1
    assert book.labels == ("encoding: utf-8, damaged",)


FRENCH = "Où est l’été? Là-bas, derrière la forêt.\n" * 20
DOUBTS = {
    UNDECODABLE_BYTES: (FRENCH.encode() + b"\xff\n", "1 byte"),
    ENCODING_GUESSED: (b"A caf\xe9 in M\xe1laga.\n", "cp1252"),
    ENCODINGS_MIXED: (FRENCH.encode() + "Café in Köln, für Müller.\n".encode("cp1252") * 9, "cp1252 and utf-8"),
    ENCODING_OVERRULED: (("Character set encoding: cp437\n\n" + FRENCH).encode("cp1252"), "cp437"),
}


@pytest.mark.parametrize("reason", DOUBTS)
def test_what_may_be_wrong_in_the_letters_of_a_book_is_said_by_name(reason: str) -> None:
    data, detail = DOUBTS[reason]
    (flag,) = cleaned(data).flags
    assert (flag.book, flag.reason) == ("books/a.txt", reason)
    assert detail in flag.detail
    assert cleaned(FRENCH.encode()).flags == ()
    assert cleaned(FRENCH.encode("cp1252")).flags == (), "nothing is declared, and many letters tell it"


def test_c1_codes_are_repaired_and_counted_as_a_trait() -> None:
    book = cleaned("I don\x92t know\x97perhaps.\n".encode())
    assert book.text.decode() == "I don’t know—perhaps.\n"
    assert [label for label in book.labels if "C1" in label]


def test_what_was_removed_is_counted_in_characters_by_rule() -> None:
    book = cleaned((HEADER + "Produced by Some One\n\n\n\x07It be\u00adgan \u00ading\ufeff.\n").encode())
    assert book.text == b"It began ing.\n"
    assert book.removed == {
        "header": len(HEADER.strip()), "credits": len("Produced by Some One"), "control characters": 1,
        "soft hyphens": 2, "byte order marks": 1,
    }  # fmt: skip


def test_a_few_zero_bytes_are_left_out_and_counted() -> None:
    text = ("It was a quiet morning on the harbour road.\n" * 99).encode()
    book = cleaned(text[:300] + b"\0" + text[300:] + b"\0\n")
    assert (book.text, book.replaced_bytes) == (text, 2)
    assert [flag.reason for flag in book.flags] == [UNDECODABLE_BYTES]
    assert isinstance(clean(RawBook("a", "a", text[:300] + bytes(40) + text[300:])), DroppedBook)


@pytest.mark.parametrize(
    ("text", "seems"),
    [
        ("<!DOCTYPE html>\n<html>\n<p>It began.</p>", "HTML"),
        ('<?xml version="1.0"?>\n<TEI><p>It began.</p></TEI>', "HTML"),
        ('{"text": "It began.", "url": "https://example.org"}\n' * 9, "JSON"),
        ('[\n  {\n    "text": "It began."\n  }\n]', "JSON"),
        (base64.encodebytes(bytes(range(256)) * 9).decode(), "base64"),
        ("It began.\n<|endoftext|>\n" * 9, "--doc-separator"),
        ("<< It began >>\n\nHe wrote <p> for a paragraph.\n", None),
        ('"It began," he said: {"so": 1}.\n', None),
        ("WHAT IS SAID ABOUT <|endoftext|>\n\nIt ends a text.\n", None),
    ],
)
def test_what_seems_to_be_no_book_is_said(text: str, seems: str | None) -> None:
    labels = [label for label in cleaned(text.encode()).labels if label.startswith(SUSPECT_PREFIX)]
    assert len(labels) == bool(seems)
    assert not seems or seems in labels[0]
