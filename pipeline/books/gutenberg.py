"""Remove Project Gutenberg's wrapping, and parse its header.

Only the beginning and the end of a file are searched, first for fixed words and then, around those, by
regular expressions: a pattern run over a whole book would cost more than encoding it.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

NEAR, HEAD = 4_000, 40_000
"""Bytes in which a header ends: nearly always the first, sometimes (with the licence in front) the second."""
LICENCE, TAIL = 24_000, 60_000
"""Bytes before the end in which a footer begins, in the same way."""
FRONT = 5_000
"""Bytes after the header that are searched for credits and transcribers' notes."""
LONG = 500
"""A paragraph of more bytes belongs to the book; credits come before it."""
LONGEST = 2_000
"""A paragraph of more bytes belongs to the book even if it names Project Gutenberg: a text joined to one line."""
NOTE = 12_000
"""The longest closing transcriber's note, in bytes."""

_STARTS = (
    ("start line", b"START OF THIS PROJECT GUTENBERG"),
    ("start line", b"START OF THE PROJECT GUTENBERG"),
    ("small print", b"*END*THE SMALL PRINT"),
    ("small print", b"*END THE SMALL PRINT"),
    ("small print", b"SMALL PRINT! FOR __ COMPLETE SHAKESPEARE"),
)
_ENDS = (
    ("end line", b"END OF THIS PROJECT GUTENBERG"),
    ("end line", b"END OF THE PROJECT GUTENBERG"),
    ("end sentence", b"END OF PROJECT GUTENBERG"),
    ("end sentence", b"END OF THIS ETEXT"),
    ("end sentence", b"*PROJECT GUTENBERG ETEXT OF"),
    ("end sentence", b"THIS FILE SHOULD BE NAMED"),
    ("licence", b"START: FULL LICENSE"),
)
# What may be between the footer's beginning and a marker: the beginning of a line, or in a text joined to one line,
# asterisks or the spaces that were an empty line.
_BEFORE_END = re.compile(rb"(?:\A|(?<=\n)|(?<=  )|(?=\*{3}))[ \t*_]*(?:THE )?\Z")

# A start line may span several lines, up to its closing asterisks; in a text without line ends, only they end it.
_REST_OF_START = re.compile(
    rb"[^*\n]{0,400}(?:\n[^*\n]{0,200}){0,4}?\*{2,}[^\n]{0,200}\n|[^\n]{0,400}\n|[^*\n]{0,400}\*{2,}"
)
_SHAKESPEARE = re.compile(rb"<<THIS ELECTRONIC VERSION OF THE COMPLETE WORKS[^>]*>>\n*")
_VERSION_LINE = re.compile(rb'\n*\["Small Print" V[^\n]*\n')

_PARAGRAPH = re.compile(rb"\n*([^\n]+(?:\n[^\n]+)*)(?:\n|\Z)")
_OURS = (
    b"project gutenberg", b"gutenberg.org", b"gutenberg.net", b"pgdp.net", b"distributed proofread", b"archive.org/",
    b"world library, inc", b"set encoding:",
    b"text prepared", b"text was prepared", b"text produced", b"text was produced", b"book was produced",
    b"book produced", b"book was prepared", b"book prepared", b"text transcribed", b"book transcribed", b"text scanned",
    b"this file was first posted", b"this file was produced", b"this file was last updated",
)  # fmt: skip
_CREDIT = re.compile(
    rb"[|\s]*(?:produced by|e-?text (?:prepared|produced)|prepared by|transcribed (?:from|by)|digiti[sz]ed by"
    rb"|scanned (?:and|by)|html version|proofread|text file|updated|this e-?(?:text|book)|images? (?:generously|of the)"
    rb"|note: (?:images|project|this|the original|there is)|there is an improved|an? (?:alternative )?edition of this"
    rb"|see \d+-|see transcriber|\(?https?://|\*{20,}|[a-z ]*executive director)"
)
_OPENING = re.compile(rb"Project Gutenberg(?:'s)? (?:E-?text|E-?book)", re.I)
_APOSTROPHE = rb"(?:'|\xe2\x80\x99)?"
_NOTE = re.compile(
    rb"[|\s*=\[({_+-]*(?:the )?(?:transcriber|transcription|scanner|proofreader|redactor)"
    + (_APOSTROPHE + rb"s?" + _APOSTROPHE)
    + rb" notes?\b"
)
# What a transcriber's note does not contain: the opening of a book, and what may follow a closing note.
_OPENS_BOOK = re.compile(rb"[\s_*=]*(?:chapter|book|part|act|preface|contents)(?![a-z])", re.I)
_BACK_MATTER = re.compile(rb"\n\n\n[\s_*=\[]*(?:footnotes?|index|appendi(?:x|ces)|glossary|advertisements?)(?![a-z])")
_NOTES_BY_DIRECTOR = re.compile(rb"Executive Director's Notes:.{0,4000}?\nExecutive Director\n", re.S)

_FIELD = re.compile(
    rb"^(Title|Author|Language|Release Date|Posting Date):[ \t]*(\S[^\n]*(?:\n[ \t]+\S[^\n]*)*)", re.M | re.I
)
_JOINED_FIELD = re.compile(rb" +(?=(?:Title|Author|Language|Release Date|Posting Date|Character set encoding):)")
_TITLE_LINE = re.compile(
    rb"Project Gutenberg(?:'s)? (?:E-?(?:text|book) of )?([^\n]{3,200}?),? by (?:the )?([^\n*]{3,80})", re.I
)
_SHAKESPEARE_TITLE = re.compile(rb"^The Complete Works of William Shakespeare,?\n+([A-Z][^\n]+)\n", re.M)
_ENCODING = re.compile(rb"set encoding:[ \t]*([A-Za-z0-9_.: -]+)", re.I)


@dataclass(frozen=True)
class Unwrapped:
    """A book without its wrapping, the fields of its header, and the forms that were recognized."""

    body: bytes
    forms: tuple[str, ...] = ()
    fields: dict[str, str] = field(default_factory=dict)
    """``title``, ``author``, ``language``, ``released``, if the header has them."""


def unwrap(text: bytes) -> Unwrapped:
    """The book in ``text``; all of it if no wrapping is recognized."""
    forms: list[str] = []
    start = _find_start(text, forms)
    wrapped = start > 0 or _OPENING.search(text[:1000]) is not None
    stop = _find_stop(text, start, forms, wrapped=wrapped)
    if not forms and not wrapped:
        return Unwrapped(text)
    stop = _before_note(text, start, stop, forms)
    front = text[start : min(start + FRONT, stop)]
    kept = _without_credits(front, forms)
    rest = memoryview(text)[start + len(front) : stop - _blanks_before(text, stop)]
    if not len(rest) and not kept.strip():
        kept = front  # credits are never all of a book
    body = b"".join((kept.lstrip(), rest, b"\n"))
    if text.find(b"THIS ELECTRONIC VERSION OF THE COMPLETE WORKS", 0, HEAD) >= 0:
        forms.append("notices between scenes")
        body = _SHAKESPEARE.sub(b"", body)
    return Unwrapped(body, tuple(dict.fromkeys(forms)), _fields(text[:start] or text[:FRONT]))


def declared_encoding(head: bytes) -> str | None:
    """The character set that a header names."""
    match = _ENCODING.search(head[:HEAD])
    return match[1].decode("ascii", "replace").strip() if match else None


def _blanks_before(text: bytes, stop: int) -> int:
    """Number of spaces and line ends before ``stop``, at most 500."""
    end = text[max(0, stop - 500) : stop]
    return len(end) - len(end.rstrip())


def _find_start(text: bytes, forms: list[str]) -> int:
    """The end of the header; 0 without one."""
    upper = text[:NEAR].upper()
    if not any(marker in upper for form, marker in _STARTS if form == "start line"):
        upper = text[:HEAD].upper()
    start = 0
    for form, marker in _STARTS:
        at = upper.rfind(marker)
        rest = _REST_OF_START.match(text, at + len(marker)) if at >= 0 else None
        if rest:
            forms.append(form)
            version = _VERSION_LINE.match(text, rest.end())
            start = max(start, version.end() if version else rest.end())
    return start


def _find_stop(text: bytes, start: int, forms: list[str], *, wrapped: bool) -> int:
    """The beginning of the footer; the end of ``text`` without one.

    Markers that do not name Project Gutenberg count only if there is a header.
    """
    offset = max(start, len(text) - LICENCE)
    upper = text[offset:].upper()
    if not any(marker in upper for form, marker in _ENDS if form == "end line"):
        offset = max(start, len(text) - TAIL)
        upper = text[offset:].upper()
    stop = len(text)
    for form, marker in _ENDS:
        if not wrapped and b"PROJECT GUTENBERG" not in marker:
            continue
        at = upper.find(marker, 0, stop - offset)
        while at >= 0:
            line = upper.rfind(b"\n", 0, at) + 1
            opening = _BEFORE_END.search(upper, line, at)
            if opening:
                forms.append(form)
                stop = min(stop, offset + opening.start())
                break
            at = upper.find(marker, at + 1, stop - offset)
    return stop


def _before_note(text: bytes, start: int, stop: int, forms: list[str]) -> int:
    """The beginning of a transcriber's note at the end of ``text[start:stop]``; ``stop`` without one."""
    offset = max(start, stop - NOTE)
    lower = text[offset:stop].lower()
    at = lower.find(b"transcriber")
    while at >= 0:
        line = lower.rfind(b"\n", 0, at) + 1
        begins_paragraph = line >= 2 and lower[line - 2 : line] == b"\n\n"
        if begins_paragraph and offset + line > start + FRONT and _NOTE.match(lower, line):
            after_bracket = _after_bracket(text[:stop], offset + line)
            if after_bracket is None:
                alone = not _BACK_MATTER.search(lower, line)
            else:
                alone = len(text[after_bracket:stop].strip()) < 200
            if alone:
                forms.append("closing note")
                return offset + len(lower[:line].rstrip(b" *\t\n"))
        at = lower.find(b"transcriber", at + 1)
    return stop


def _without_credits(front: bytes, forms: list[str]) -> bytes:
    """The beginning of a book without credits, notes on the file and transcribers' notes."""
    if b"Executive Director's Notes:" in front:
        front = _NOTES_BY_DIRECTOR.sub(b"", front)
    lower = front.lower()
    ours = _mentions(lower)
    kept: list[bytes] = []
    position = 0
    last = max([*ours[-1:], lower.rfind(b"note")])
    for begin, end, paragraph in _paragraphs(lower):
        if begin < position:
            continue
        if kept and begin > last:
            break
        stop = None
        if len(paragraph) > LONGEST:
            return b"".join([*kept, front[position:]])
        if _NOTE.match(paragraph):
            stop = _end_of_note(front, begin, end)
            forms.append("opening note")
        elif bisect_left(ours, begin) < bisect_left(ours, end) or (not kept and _CREDIT.match(paragraph)):
            stop = end
            forms.append("credits")
        if stop is None:
            kept.append(front[position:end])
            if len(paragraph) > LONG or paragraph.startswith(b"chapter"):
                return b"".join([*kept, front[end:]])
        position = stop or end
    return b"".join([*kept, front[position:]])


def _mentions(lower: bytes) -> list[int]:
    """Positions of the words in ``_OURS``, in order."""
    found = []
    for words in _OURS:
        at = lower.find(words)
        while at >= 0:
            found.append(at)
            at = lower.find(words, at + 1)
    return sorted(found)


def _paragraphs(front: bytes, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Bounds and text of the paragraphs that are complete in ``front``, from ``offset``."""
    for match in _PARAGRAPH.finditer(front, offset):
        if match.end() == len(front) == FRONT:
            return
        yield match.start(1), match.end(), match[1]


def _end_of_note(front: bytes, begin: int, end: int) -> int:
    """The end of the note whose first paragraph is ``front[begin:end]``: its closing bracket, or that paragraph.

    A bare heading includes the next paragraph. Indented ones follow, up to two empty lines or the opening of a book.
    """
    bracket = _after_bracket(front, begin)
    if bracket is not None:
        return bracket
    bare = not re.search(rb"\w", _NOTE.sub(b"", front[begin:end].lower(), count=1))
    for first, last, paragraph in _paragraphs(front, end):
        continued = bare or (first - end < 2 and paragraph[:1] in b" \t")
        if not continued or _OPENS_BOOK.match(paragraph) or paragraph.isupper():
            break
        end, bare = last, False
    return end


def _after_bracket(text: bytes, begin: int) -> int | None:
    """The end of the bracket that opens at ``begin`` (after spaces); None if none opens or it is not closed."""
    opening = text[begin : begin + 40].lstrip()
    if not opening.startswith(b"["):
        return None
    depth = 0
    for match in re.finditer(rb"[\[\]]", text[begin : begin + NOTE]):
        depth += 1 if match[0] == b"[" else -1
        if depth == 0:
            return begin + match.end()
    return None


def _fields(head: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    if b"\n" not in head.strip():
        head = _JOINED_FIELD.sub(b"\n", head)
    for name, value in _FIELD.findall(head):
        found.setdefault(name.decode().lower(), _line(value))
    if "title" not in found and (match := _SHAKESPEARE_TITLE.search(head)):
        found |= {"title": _line(match[1]), "author": "William Shakespeare"}
    if "title" not in found and (match := _TITLE_LINE.search(head)):
        found["title"] = _line(match[1])
        found.setdefault("author", _line(match[2]))
    released = found.pop("release date", None) or found.pop("posting date", None)
    found.pop("posting date", None)
    if released:
        found["released"] = released.split("[")[0].strip()
    return found


def _line(value: bytes) -> str:
    return " ".join(value.decode("utf-8", "replace").split())
