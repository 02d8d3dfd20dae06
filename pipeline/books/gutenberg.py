"""Removal of Project Gutenberg's wrapping, and parsing of its header.

A file may contain one book or several joined books, and other texts before, between and after them. Text is removed
only if its form proves that it is wrapping:

- a header, up to a marker line, if it has the lines of such headers
- a footer, from a marker line on, if a license or the end of the file follows

Markers that a text quotes are kept. The whole file is only searched for the name of the project in capitals, which all
wrapping contains. Regular expressions match the text around the name, because matching a whole book would take longer
than encoding it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeline.books import sister_projects
from pipeline.books.credits import FRONT_MATTER_BYTES, OPENING, SHORT_TEXT_BYTES, find_note_start, remove_credits
from pipeline.books.normalization import count_characters

NEAR_HEADER_BYTES, MAX_HEADER_BYTES = 4_000, 40_000
"""Maximum size of a header in bytes, without and with the license in front of it."""
HEADER_FIELDS_BYTES = 1_000
"""Number of bytes before a start line that contain the fields of the header."""
END_SENTENCE_BYTES = 600
"""Number of bytes before an end line that are searched for a closing sentence."""
FOOTER_START_BYTES, MAX_FOOTER_BYTES = 1_500, 60_000
"""Maximum number of bytes from the start of a footer to the words that identify it, and maximum size of a footer."""
_NAME = b"PROJECT GUTENBERG"
_LINE = re.compile(rb"(START|END) OF (?:TH(?:IS|E) )?(?:COPYRIGHTED )?\Z")
_SMALL_PRINT_ENDS = (
    b"*END*THE SMALL PRINT", b"*END THE SMALL PRINT", b"END: SMALL PRINT", b"SMALL PRINT! FOR __ COMPLETE SHAKESPEARE",
)  # fmt: skip
MAX_SMALL_PRINT_BYTES = 20_000
"""Maximum size in bytes of the small print."""
# Closings of books without an end line: a label, words to search for, and a pattern for the text before them in their
# line.
_CLOSINGS = (
    ("end sentence", b" GUTENBERG", re.compile(
        rb"\b(?:(?:THE )?(?:ENDE?|FINE?|FINAL|FIM|FI|EINDE|SLUT(?:ET)?|FINO|KONIEC|KONEC|LOPPU)(?: \S+){0,4}"
        rb" PRO[JYG]E\w{1,5}|THIS IS A COPYRIGHTED PROJECT|THIS SITE IS FULL OF FREE E-?BOOKS[ -]+PROJECT)\Z")),
    ("end sentence", b"*PROJECT GUTENBERG ETEXT OF", re.compile(rb"\Z")),
    ("end sentence", b"ETEXT", re.compile(rb"\b(?:END OF THIS|ENDE DIESES|FIN DE CET|FINE DI QUESTO) \Z")),
    ("end sentence", b"THIS FILE SHOULD BE NAMED", re.compile(rb"\Z")),
    ("license", b"START: FULL LICENSE", re.compile(rb"\Z")),
    ("small print", b"SMALL PRINT!", re.compile(rb"START(?:: |\*\*THE )\Z")),
)  # fmt: skip
# Fields that only headers have before a start line.
_PROOF = re.compile(
    rb"(?:^|  )(?:(?:Language|Release Date|Posting Date|Character set encoding):[ \t]"
    rb"|This e-?book is for the use of anyone anywhere)", re.M | re.I
)  # fmt: skip
# For a text without line ends: fields before a start line, the first words of a header, and a sentence before an end
# line.
_JOINED_PROOF = re.compile(rb" (?:Language|Release Date|Posting Date|Cha[rt]acter set encoding): ")
_JOINED_OPENING = re.compile(
    rb"(?<!nd of )(?<!nd of the )(?:The )?Project Gutenberg [Ee]-?(?:[Tt]ext|[Bb]ook)(?: of|,) "
)
_JOINED_CLOSING = re.compile(rb"(?<=[.!?\"')\]_*>\x99\x9d] )End of (?:the |this )?Project Gutenberg[^*]{0,300}\Z", re.I)
JOINED_FIELDS_BYTES = 200
"""Maximum number of bytes between the last field and the start line in a text without line ends."""
# Words of the license after an end line, and its last words.
_LEGAL = (
    b"Updated editions will replace the previous", b"START: FULL LICENSE", b"THE FULL PROJECT GUTENBERG LICENSE",
    b"file should be named", b"all associated files of various formats", b"are often created from several",
    b"A Word from Project Gutenberg", b"START**THE SMALL PRINT", b"START: SMALL PRINT",
)  # fmt: skip
_MENTIONS = (b"utenberg", b"UTENBERG", b"Updated editions will replace")
LICENSE_MENTION_BYTES = 3_000
"""Maximum number of bytes between two mentions of Project Gutenberg in a license."""
_LEGAL_ENDS = (b"hear about new eBooks.", b"END: FULL LICENSE", b"GUTINDEX.ALL", *_SMALL_PRINT_ENDS)

# A start line may span several lines, up to its closing asterisks; in a text without line ends, only asterisks end it.
_MARKER_REMAINDER = re.compile(
    rb"[^*\n]{0,400}(?:\n[^*\n]{0,200}){0,4}?\*{2,}[^\n]{0,200}\n|[^\n]{0,400}\n|[^*\n]{0,400}\*{2,}"
)

_SHAKESPEARE = re.compile(rb"<<THIS ELECTRONIC VERSION OF THE COMPLETE WORKS[^>]*>>\n*")
_VERSION_LINE = re.compile(rb'\n*\["Small Print" V[^\n]*\n')

_TEXT = re.compile(rb"\S")
# Paragraphs of headers besides the parsed fields: other fields, and remarks in brackets.
_HEADER_PARAGRAPH = re.compile(rb"(?:[A-Z][A-Za-z ]{2,40}:[ \t]\S[^\n]{0,200}|\[[^\]]{0,300}\]|[*\s]*)\Z")
_FIELD = re.compile(
    rb"^_?(Title|Author|Language|Release Date|Posting Date):_?[ \t]*(\S[^\n]*(?:\n[ \t]+\S[^\n]*)*)", re.M | re.I
)
_JOINED_FIELD = re.compile(rb"(?<! ) +(?=(?:Title|Author|Language|Release Date|Posting Date|Character set encoding):)")
_TITLE_LINE = re.compile(
    rb"Project Gutenberg(?:'s)? (?:E-?(?:text|book) of )?([^\n]{3,200}?),? by (?:the )?([^\n*]{3,80})", re.I
)
_SHAKESPEARE_TITLE = re.compile(rb"^The Complete Works of William Shakespeare,?\n+([A-Z][^\n]+)\n", re.M)
_ENCODING = re.compile(rb"^Cha[rt]acter set encoding:[ \t]*([A-Za-z0-9_.: -]+)", re.M | re.I)


@dataclass(frozen=True)
class Unwrapped:
    """Book without its wrapping, with the fields of its header and the labels of the recognized patterns."""

    body: bytes
    patterns: tuple[str, ...] = ()
    fields: dict[str, str] = field(default_factory=dict)
    """Fields of the header that are present, of ``title``, ``author``, ``language`` and ``released``."""
    removed: dict[str, int] = field(default_factory=dict)
    """Number of removed characters by kind of wrapping, without surrounding blank lines."""


def unwrap(text: bytes) -> Unwrapped:
    """Return the book or books in ``text`` without wrapping; all of ``text`` if no wrapping is recognized."""
    opening = OPENING.search(text, 0, HEADER_FIELDS_BYTES)
    has_opening = opening is not None and not text[: opening.start()].strip()
    spans = _find_wrapping(text, has_opening=has_opening)
    if not spans and not has_opening:
        return Unwrapped(text)
    removed: Counter[str] = Counter()
    bodies: list[bytes | memoryview] = []
    for previous, following in pairwise([_Span(0, 0, is_header=has_opening), *spans, _Span(len(text), len(text))]):
        if previous.is_header:
            bodies += _remove_additions(text, previous.stop, following.start, removed)
        elif text[previous.stop : following.start].strip():
            bodies += (memoryview(text)[previous.stop : following.start], b"\n\n\n")
    body = b"".join([*bodies[:-1], b"\n"])
    headers = [text[span.start : span.stop] for span in spans if span.is_header]
    if any(b"THIS ELECTRONIC VERSION OF THE COMPLETE WORKS" in header for header in headers):
        unfiltered_body = body
        body = _SHAKESPEARE.sub(b"", body)
        removed["notices between scenes"] += count_characters(unfiltered_body) - count_characters(body)
    patterns = [pattern for span in spans for pattern in span.patterns] + [name for name in removed if name != "header"]
    for span in spans:
        removed["header" if span.is_header else "footer"] += count_characters(text[span.start : span.stop].strip())
    return Unwrapped(
        body,
        tuple(dict.fromkeys(patterns)),
        _parse_fields(headers[0] if headers else text[:FRONT_MATTER_BYTES]),
        removed,
    )


def declared_encoding(text: bytes) -> str | None:
    """Return the encoding that a header at the beginning of ``text`` declares; ``text`` is not normalized yet."""
    head = text[:MAX_HEADER_BYTES].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\n" not in head.strip():
        head = _JOINED_FIELD.sub(b"\n", head)
    match = _ENCODING.search(head)
    if match is None:
        return None
    preceding = head[: match.start()]
    if preceding.strip() and not OPENING.search(preceding) and not _FIELD.search(preceding):
        return None  # The book itself mentions an encoding.
    return match[1].decode("ascii", "replace").strip()


@dataclass(frozen=True)
class _Span:
    """Span of wrapping, or of a line that may be part of wrapping. A book begins after a ``is_header``."""

    start: int
    stop: int
    patterns: tuple[str, ...] = ()
    is_header: bool = False


def _find_wrapping(text: bytes, *, has_opening: bool) -> list[_Span]:
    """Return the headers and footers in ``text``, in order; ``has_opening`` means that it begins like a header."""
    marks = _find_markers(text)
    low = sister_projects.find_header_end(text)
    headers = [_Span(0, low, ("sister project",), is_header=True)] if low else []
    for mark in marks:
        start = _find_header_start(text, low, mark, headers) if mark.is_header else None
        if start is not None and headers and start == headers[-1].stop and not OPENING.match(text, start):
            headers[-1] = replace(headers[-1], stop=mark.stop, patterns=headers[-1].patterns + mark.patterns)
        elif start is not None:
            headers.append(replace(mark, start=start))
        low = mark.stop
    # Small print may also be at the end of a book.
    bounds = [*(header.start for header in headers[1:]), len(text)]
    headers = [
        header
        for header, bound in zip(headers, bounds, strict=False)
        if "start line" in header.patterns or _TEXT.search(text, header.stop, bound)
    ]
    spans: list[_Span] = []
    for header, following in pairwise([_Span(0, 0, is_header=has_opening), *headers, _Span(len(text), len(text))]):
        ends = [mark for mark in marks if not mark.is_header and header.stop <= mark.start < following.start]
        spans += [header] * (header.stop > 0)
        spans += _find_footers(text, header.stop, following.start, ends, has_header=header.is_header)
    if spans and spans[0].patterns == ("sister project",):
        title = _parse_fields(text[: spans[0].stop]).get("title", "")
        if (closing := sister_projects.find_closing_start(text, spans[-1].stop, title)) is not None:
            spans.append(_Span(closing, len(text), ("end sentence",)))
    return spans


def _find_markers(text: bytes) -> list[_Span]:
    """Return all start lines, ends of small print and end lines, even quoted ones; the first two count as headers."""
    markers: dict[int, _Span] = {}

    def add(at: int, after: int, pattern: str) -> None:
        marker_end = _MARKER_REMAINDER.match(text, after)
        stop = marker_end.end() if marker_end else after
        version = _VERSION_LINE.match(text, stop)
        markers[at] = _Span(at, version.end() if version else stop, (pattern,), is_header=pattern != "end line")

    searched = 0
    for searched_text, first in ((text[:NEAR_HEADER_BYTES].upper(), 0), (text, NEAR_HEADER_BYTES - len(_NAME))):
        at = searched_text.find(_NAME, max(0, first))
        while at >= 0:
            after = at + len(_NAME)
            if line := _LINE.search(searched_text, max(0, at - 40), at):
                if (begin := _find_marker_start(searched_text, line.start())) is not None:
                    add(begin, after, "start line" if line[1] == b"START" else "end line")
            elif text.find(b"SMALL PRINT", max(0, at - NEAR_HEADER_BYTES), at + NEAR_HEADER_BYTES) >= 0:
                for words in _SMALL_PRINT_ENDS:
                    end = text.find(words, max(at, searched), at + MAX_SMALL_PRINT_BYTES)
                    while end >= 0:
                        add(end, end + len(words), "small print")
                        end = text.find(words, end + 1, at + MAX_SMALL_PRINT_BYTES)
                # A marker may cross the end of the searched bytes, so the next search overlaps.
                searched = at + MAX_SMALL_PRINT_BYTES - NEAR_HEADER_BYTES
            at = searched_text.find(_NAME, after)
    return [markers[at] for at in sorted(markers)]


def _find_marker_start(text: bytes, at: int) -> int | None:
    """Return the start of the line of the marker whose first word is at ``at``; None if other words precede it.

    In a text without line ends, a marker follows asterisks or the spaces that replaced an empty line.
    """
    preceding = text[max(0, at - 80) : at]
    line_text = preceding.rstrip(b" \t*_")
    signs = preceding[len(line_text) :]
    is_line_start = not line_text or line_text.endswith(b"\n")
    if not is_line_start and (b"  " in signs or b"***" in signs):
        is_line_start = _is_joined(text, at)
    return at - len(signs) if is_line_start else None


def _find_header_start(text: bytes, low: int, mark: _Span, headers: list[_Span]) -> int | None:
    """Return the start, at or after ``low``, of the header that ends with ``mark``; None if nothing proves a header."""
    first = max(low, mark.start - MAX_HEADER_BYTES)
    fields_start = max(first, mark.start - HEADER_FIELDS_BYTES)
    opening = OPENING.search(text, first, mark.start)
    proof = _PROOF.search(text, fields_start, mark.start)
    if proof is None and "start line" in mark.patterns and _is_joined(text, mark.start):
        proof = _JOINED_PROOF.search(text, fields_start, mark.start)
        opening = opening or next(_JOINED_OPENING.finditer(text, fields_start, mark.start), None)
    # A header may end with a start line and with small print.
    is_chained = bool(headers) and headers[-1].stop == low and headers[-1].patterns[-1:] != mark.patterns
    if opening if "small print" in mark.patterns else proof:
        lines = (opening, proof, _FIELD.search(text, fields_start, mark.start))
        start = min(line.start() for line in lines if line)
        if not (opening or _is_header_end(text, fields_start, mark.start)):
            return None
        is_below_title = low == 0 and len(text[:start].strip()) <= SHORT_TEXT_BYTES
        return low if is_below_title or (is_chained and first == low and not opening) else start
    max_title_bytes = SHORT_TEXT_BYTES if is_chained and "small print" in mark.patterns else 0
    return (
        low
        if (is_chained or mark.start < MAX_HEADER_BYTES) and len(text[low : mark.start].strip()) <= max_title_bytes
        else None
    )


def _is_joined(text: bytes, at: int) -> bool:
    """Return whether ``text`` has no line ends around ``at``."""
    return b"\n" not in text[max(0, at - HEADER_FIELDS_BYTES) : at + HEADER_FIELDS_BYTES]


def _is_header_end(text: bytes, fields_start: int, stop: int) -> bool:
    """Return whether only credits are between the last field of a header and its start line, which begins at
    ``stop``."""
    fields = [*_FIELD.finditer(text, fields_start, stop), *_PROOF.finditer(text, fields_start, stop)]
    if _is_joined(text, stop):
        fields += _JOINED_PROOF.finditer(text, fields_start, stop)
        return stop - max(field.end() for field in fields) < JOINED_FIELDS_BYTES
    last_field_end = text.find(b"\n", max(field.end() for field in fields) - 1, stop)
    remainder = b"".join(
        paragraph
        for paragraph in text[last_field_end:stop].split(b"\n\n")
        if not _HEADER_PARAGRAPH.match(paragraph.strip())
    )
    return last_field_end < 0 or not remove_credits(remainder, Counter()).strip()


def _find_footers(text: bytes, low: int, limit: int, ends: list[_Span], *, has_header: bool) -> list[_Span]:
    """Return the footers in ``text[low:limit]``; ``ends`` are its end lines."""
    spans: list[_Span] = []
    for end, following in pairwise([*ends, _Span(limit, limit)]):
        if end.start >= low and _is_footer(text, end.stop, following.start, has_header=has_header):
            begin = max(low, end.start - END_SENTENCE_BYTES)
            sentences = [begin + at for at, _ in _find_closings(text[begin : end.start].upper(), has_header=has_header)]
            sentences += [other_end.start for other_end in ends if begin <= other_end.start < end.start]
            low = _find_footer_end(text, end.stop, limit)
            start = end.start
            if _is_joined(text, start) and (sentence := _JOINED_CLOSING.search(text, begin, start)):
                sentences.append(sentence.start())
            for at in sorted(sentences, reverse=True):
                start = start if b"\n\n" in text[at:start].strip() else at
            spans.append(replace(end, start=start, stop=low))
    if not spans:
        begin = max(low, limit - MAX_FOOTER_BYTES)
        for start, pattern in sorted(_find_closings(text[begin:limit].upper(), has_header=has_header)):
            if _is_footer(text, begin + start, limit, has_header=has_header):
                return [_Span(begin + start, _find_footer_end(text, begin + start, limit), (pattern,))]
        # The end line is a footer by itself if another text follows the book.
        if has_header and ends and text[ends[-1].start] not in b" \t":
            return ends[-1:]
    return spans


def _find_closings(upper: bytes, *, has_header: bool) -> Iterator[tuple[int, str]]:
    """Yield (start, label) of closing sentences in ``upper``; without a header, they must name the project."""
    for pattern, words, preceding_pattern in _CLOSINGS if has_header else _CLOSINGS[:1]:
        at = upper.find(words)
        while at >= 0:
            match = preceding_pattern.search(upper, max(0, at - 80), at)
            if match and (start := _find_marker_start(upper, match.start())) is not None:
                yield start, pattern
            at = upper.find(words, at + 1)


def _is_footer(text: bytes, at: int, bound: int, *, has_header: bool) -> bool:
    """Return whether a license begins at ``at``, or only closing sentences follow up to ``bound``."""
    footer_beginning = text[at : min(bound, at + FOOTER_START_BYTES)]
    if any(words in footer_beginning for words in _LEGAL):
        return True
    if bound - at >= FOOTER_START_BYTES or len(footer_beginning.strip()) > SHORT_TEXT_BYTES:
        return False
    sentences = filter(None, footer_beginning.upper().strip().split(b"\n\n"))
    return all(
        any(start == 0 for start, _ in _find_closings(each.lstrip(), has_header=has_header)) for each in sentences
    )


def _find_footer_end(text: bytes, at: int, limit: int) -> int:
    """Return the end of the license that begins at ``at``, by its last words or the last mention of the project."""
    furthest = min(limit, at + MAX_FOOTER_BYTES)
    last_mention = at
    while (
        mention := max(
            text.rfind(name, last_mention, min(furthest, last_mention + LICENSE_MENTION_BYTES)) for name in _MENTIONS
        )
    ) >= 0:
        last_mention = mention + 1
    reach = min(furthest, last_mention + LICENSE_MENTION_BYTES)
    ends = [position + len(words) for words in _LEGAL_ENDS if (position := text.rfind(words, at, reach)) >= 0]
    license_end = max(ends, default=last_mention)
    stop = text.find(b"\n", license_end, min(furthest, license_end + FOOTER_START_BYTES))
    if stop < 0:
        stop = license_end if _is_joined(text, license_end) else min(furthest, license_end + FOOTER_START_BYTES)
    return furthest if limit - stop < NEAR_HEADER_BYTES and len(text[stop:limit].strip()) <= SHORT_TEXT_BYTES else stop


def _remove_additions(text: bytes, start: int, stop: int, removed: Counter[str]) -> list[bytes | memoryview]:
    """Return the book in ``text[start:stop]`` without the additions of its editors, as parts to join."""
    stop = find_note_start(text, start, stop, removed)
    front = text[start : min(start + FRONT_MATTER_BYTES, stop)]
    front_removed: Counter[str] = Counter()
    front_matter = remove_credits(front, front_removed).lstrip()
    remainder = memoryview(text)[start + len(front) : stop - _count_trailing_blanks(text, stop)]
    if not len(remainder) and not front_matter.strip():
        front_matter = front.strip()  # A book that only consists of credits is kept.
    else:
        removed.update(front_removed)
    return [front_matter, remainder, b"\n\n\n"] if front_matter or len(remainder) else []


def _count_trailing_blanks(text: bytes, stop: int) -> int:
    """Return the number of spaces and line ends before ``stop``, at most 500."""
    end = text[max(0, stop - 500) : stop]
    return len(end) - len(end.rstrip())


def _parse_fields(head: bytes) -> dict[str, str]:
    values: dict[str, str] = {}
    if b"\n" not in head.strip():
        head = _JOINED_FIELD.sub(b"\n", head)
    for name, value in _FIELD.findall(head):
        values.setdefault(name.decode().lower(), _to_line(value))
    if "title" not in values and (match := _SHAKESPEARE_TITLE.search(head)):
        values |= {"title": _to_line(match[1]), "author": "William Shakespeare"}
    if "title" not in values and (match := _TITLE_LINE.search(head)):
        values["title"] = _to_line(match[1])
        values.setdefault("author", _to_line(match[2]))
    released = values.pop("release date", None) or values.pop("posting date", None)
    values.pop("posting date", None)
    if released:
        values["released"] = released.split("[")[0].strip()
    return values


def _to_line(value: bytes) -> str:
    return " ".join(value.decode("utf-8", "replace").split())
