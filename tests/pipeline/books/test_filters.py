"""What is left out and what is not, close to each limit."""

import hashlib
import random

from pipeline.books.cleaning import Book
from pipeline.books.filters import drop_reason
from pipeline.config import ReadingConfig

WORDS = """the lantern of a winter morning was not with her captain but under every garden wall by river and there he
    heard what they had said of him when nobody else could hear it because their voices were as clear as church bells
    that ring across water at night while all good people sleep in houses whose windows look down upon some quiet street
    """.split()  # noqa: SIM905
PROSE = " ".join(random.Random(0).choices(WORDS, k=1000))
LEDGER = "; ".join(f"paid {n}.50 to {WORDS[n * 7 % len(WORDS)]}" for n in range(300))
SIGNS = "; ".join(f"{n * 7919 % 10007} = {n}" for n in range(300))


def reason(text: str, settings: ReadingConfig | None = None, language: str | None = None) -> str | None:
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    book = Book("a", "a", data, len(text), digest, None, None, language, None, 0, ())
    dropped = drop_reason(book, settings or ReadingConfig())
    return dropped.reason if dropped else None


def test_the_least_length_is_in_characters_and_is_enough() -> None:
    for text in ("Où est l’été? ", "It began. "):
        text = (text * 30)[:200].rstrip("\n")
        assert reason(text) is None
        assert reason(text[:199]) == "too short"


def test_an_error_page_is_left_out_as_that_however_long() -> None:
    assert reason("404: Not Found\n" * 30) == reason("404: Not Found\n") == "error page"
    page = "<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>" + "<p>The URL was not found.</p>" * 99
    assert reason(page) == "error page"


def test_every_script_is_text_and_a_ledger_too() -> None:
    russian = "Все счастливые семьи похожи друг на друга. " * 10
    chinese = "".join(chr(0x4E00 + n * 7919 % 20000) for n in range(3000))
    for text in (PROSE, LEDGER, russian, chinese):
        assert reason(text) is None, text[:40]
    assert reason(SIGNS) == "not text"
    assert reason("x" * 3000) == "not text"


def test_beginning_middle_and_end_are_tested() -> None:
    prose, signs = PROSE[:2000], SIGNS[:2000]
    for parts in ((prose, signs, signs), (signs, prose, signs), (signs, signs, prose)):
        assert reason("".join(parts)) == "not text"
        assert reason("".join(prose if part is signs else signs for part in parts)) is None
    between = SIGNS * 9
    assert reason(f"{prose}{between}{prose}{between}{prose}") is None, "and nothing else"


def test_a_short_refrain_is_not_repetitive() -> None:
    assert reason("lully lullay " * 49) is None
    assert reason("lully lullay " * 51) == "too repetitive"


def test_any_of_the_wanted_languages_is_kept() -> None:
    for declared, code in (("German", "de"), (" french ", "fr"), ("fr", "fr"), ("EN", "en")):
        for wanted in ((code,), ("la", code)):
            assert reason(PROSE, ReadingConfig(languages=wanted), declared) is None
        assert reason(PROSE, ReadingConfig(languages=("la", "it")), declared) == "language"
