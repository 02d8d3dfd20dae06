"""What the editors of an electronic text have added to a book: credits before it, notes before and behind it."""

import re
from collections.abc import Iterator

FEW = 300
"""Bytes too few for a text of its own: a title above a header, names below a licence."""
FRONT = 5_000
"""Bytes after the header that are searched for credits and transcribers' notes."""
LONG = 500
"""A paragraph of more bytes belongs to the book; credits come before it."""
LONGEST = 2_000
"""A paragraph of more bytes belongs to the book even if it begins as credits do: a text joined to one line."""
NOTE = 12_000
"""The longest closing transcriber's note, in bytes."""

OPENING = re.compile(
    rb"^(?:\*{40,}\n)?[ \t*_]*(?:(?:This is )?(?:[Tt]he )?Project Gutenberg"
    rb"(?:(?:'s|\xe2\x80\x99s)?,? (?:E-?[Tt]ext|[Ee]-?[Bb]ook)(?: of\b|,|\*|$)"
    rb"|(?:'s|\xe2\x80\x99s) [A-Z][^\n]*\n?[^\n]*\bby )"
    rb"|This E-?text file is presented by Project Gutenberg|THIS EBOOK WAS ONE OF PROJECT GUTENBERG)", re.M
)  # fmt: skip
"""The line with which a header begins."""

_PARAGRAPH = re.compile(rb"\n*([^\n]+(?:\n[^\n]+)*)(?:\n|\Z)")
_OURS = (
    b"this project gutenberg", b"pgdp.net", b"distributed proofread", b"archive.org/", b"set encoding:",
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


def before_note(text: bytes, start: int, stop: int, forms: list[str]) -> int:
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


def without_credits(front: bytes, forms: list[str]) -> bytes:
    """The beginning of a book without credits, notes on the file and transcribers' notes."""
    if b"Executive Director's Notes:" in front:
        front = _NOTES_BY_DIRECTOR.sub(b"", front)
    lower = front.lower()
    last = max(lower.rfind(b"note"), lower.rfind(b"world library, inc"))
    kept: list[bytes] = []
    position = 0
    for begin, end, paragraph in _paragraphs(lower):
        if begin < position:
            continue
        if len(paragraph) > LONGEST or (kept and begin > last):
            break
        stop = None
        if _NOTE.match(paragraph):
            stop = _end_of_note(front, begin, end)
            forms.append("opening note")
        elif b"world library, inc" in paragraph or (
            not kept and (_CREDIT.match(paragraph) or any(words in paragraph for words in _OURS))
        ):
            stop = end
            forms.append("credits")
        elif not kept and len(paragraph) <= FEW and OPENING.match(front, begin):
            stop = end
        if stop is None:
            kept.append(front[position:end])
            if len(paragraph) > LONG or paragraph.startswith(b"chapter"):
                position = end
                break
        position = stop or end
    return b"".join([*kept, front[position:]])


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
