"""Filters that drop books that are useless for training: error pages, and books that are too short, repetitive, not
text, or in another language.

The filters only test samples from the beginning, middle and end, which takes a few percent of the encoding time.
"""

import re

from pipeline.books.cleaning import Book
from pipeline.books.error_pages import find_error_message
from pipeline.books.readers import DroppedBook
from pipeline.config import ReadingConfig

SAMPLE_BYTES = 1_000
"""Size in bytes of each of the three samples of a book."""
MAX_WORD_BYTES = 1_000
"""Maximum number of bytes without a space, more than in any word, table or URL of a book."""
MIN_DISTINCT_FRACTION = 0.05
"""Minimum fraction of distinct words in a sample; novels have 0.5 to 0.75, and Genesis 5, a list of ages, has 0.25."""
MAX_NON_TEXT_FRACTION = 0.4
"""Maximum fraction of ASCII symbols and digits among all bytes; a ledger has 0.3."""

# Letters, whitespace and the bytes of other scripts.
_TEXT_BYTES = bytes(c for c in range(256) if chr(c).isalpha() or c in b" \n\t" or c >= 128)
_LONG_WORD = re.compile(rb"\S{%d}" % MAX_WORD_BYTES)

_LANGUAGE_CODES = {
    "chinese": "zh", "danish": "da", "dutch": "nl", "english": "en", "esperanto": "eo", "finnish": "fi",
    "french": "fr", "german": "de", "greek": "el", "hungarian": "hu", "icelandic": "is", "italian": "it",
    "japanese": "ja", "latin": "la", "middle english": "en", "norwegian": "no", "polish": "pl", "portuguese": "pt",
    "russian": "ru", "spanish": "es", "swedish": "sv", "tagalog": "tl", "welsh": "cy",
}  # fmt: skip


def drop_reason(book: Book, settings: ReadingConfig) -> DroppedBook | None:
    """Return the entry with the reason why ``settings`` drop ``book``; None if it is kept."""
    if error := find_error_message(book.text):
        return DroppedBook(book.id, "error page", f"an error page instead of a book: {error!r}")
    if book.chars < settings.min_chars:
        return DroppedBook(book.id, "too short", f"{book.chars:,} characters, fewer than {settings.min_chars:,}")
    sample = _sample(book.text)
    if b" " not in sample[:MAX_WORD_BYTES] and _LONG_WORD.search(sample) and book.text.isascii():
        return DroppedBook(book.id, "not text", f"a run of more than {MAX_WORD_BYTES:,} characters without a space")
    non_text = len(sample.translate(None, _TEXT_BYTES)) / len(sample)
    if non_text > MAX_NON_TEXT_FRACTION:
        return DroppedBook(book.id, "not text", f"{non_text:.0%} of a sample is neither letters nor whitespace")
    words = sample.split()
    distinct_fraction = len(set(words)) / len(words)
    if len(words) >= 100 and distinct_fraction < MIN_DISTINCT_FRACTION:
        return DroppedBook(book.id, "too repetitive", f"{distinct_fraction:.1%} of the words in a sample are distinct")
    if settings.languages:
        return _language_mismatch(book, sample, settings.languages)
    return None


def _sample(text: bytes) -> bytes:
    if len(text) <= 3 * SAMPLE_BYTES:
        return text
    middle = len(text) // 2
    return b" ".join((text[:SAMPLE_BYTES], text[middle : middle + SAMPLE_BYTES], text[-SAMPLE_BYTES:]))


def _language_mismatch(book: Book, sample: bytes, languages: tuple[str, ...]) -> DroppedBook | None:
    language = language_code(book.language) if book.language else None
    evidence = "from its header"
    if language is None:
        import py3langid  # Imported here, because few books need its model, which takes a second to load.

        language, evidence = str(py3langid.classify(sample.decode("utf-8", "replace"))[0]), "detected"
    if language in languages:
        return None
    return DroppedBook(book.id, "language", f"{language} ({evidence}), not {' or '.join(languages)}")


def language_code(name: str) -> str | None:
    """Return the ISO 639-1 code of a language by its name in a header; None if it is unknown."""
    name = name.strip().lower()
    return name if re.fullmatch("[a-z]{2}", name) else _LANGUAGE_CODES.get(name)
