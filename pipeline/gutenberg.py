"""Project Gutenberg's wrapping: find where the book begins and ends, and what the header says of it.

In: the bytes of a file with ``\\n`` line ends. Out: the bounds of the book proper, its metadata, and the
names of the forms that were recognised. Only the first and last stretches of a file are searched: the
header and the licence have a bounded length, and a search of the whole text would cost more than
encoding it.
"""

import re
from dataclasses import dataclass, field

HEAD = 32_000
TAIL = 40_000

_START_LINE = re.compile(
    rb"^[ \t]*\*{2,4} ?START OF (?:THE|THIS) PROJECT GUTENBERG[^*\n]*(?:\n[^*\n]+){0,4}?[*]{2,4}[^\n]*\n"
    rb"|^[ \t]*\*{2,4} ?START OF (?:THE|THIS) PROJECT GUTENBERG[^\n]*\n",
    re.M | re.I,
)
_SMALL_PRINT_END = re.compile(rb"^[^\n]*\*END[^\n]{0,3}THE SMALL PRINT[^\n]*\n(?:[^\n]*\*END\*[^\n]*\n)?", re.M | re.I)

_END_LINE = re.compile(rb"^[ \t]*\*{2,4} ?END OF (?:THE|THIS) PROJECT GUTENBERG", re.M | re.I)
_END_SENTENCE = re.compile(
    rb"^[ \t*_]*(?:THE )?END OF (?:(?:THE|THIS) )?(?:PROJECT GUTENBERG|ETEXT)[^\n]*"
    rb"|^[ \t]*\*PROJECT GUTENBERG ETEXT OF [^\n]*",
    re.M | re.I,
)
_FIELD = re.compile(
    rb"^(Title|Author|Language|Release Date|Editor|Translator):[ \t]*([^\n]*(?:\n[ \t]+\S[^\n]*)*)", re.M
)
_ENCODING = re.compile(rb"set encoding:[ \t]*([A-Za-z0-9_.: -]+)", re.I)


@dataclass(frozen=True)
class Wrapping:
    """Where the book lies in its file, and what its header tells."""

    start: int
    stop: int
    forms: tuple[str, ...] = ()
    fields: dict[str, str] = field(default_factory=dict)


def unwrap(text: bytes) -> Wrapping:
    """The bounds of the book in ``text``; the whole of it where no wrapping is found."""
    forms: list[str] = []
    head = text[:HEAD]
    start = 0
    for form, pattern in (("start line", _START_LINE), ("small print", _SMALL_PRINT_END)):
        matches = [match.end() for match in pattern.finditer(head)]
        if matches:
            forms.append(form)
            start = max(start, matches[-1])
    tail_at = max(start, len(text) - TAIL)
    tail = text[tail_at:]
    stop = len(text)
    for form, pattern in (("end line", _END_LINE), ("end sentence", _END_SENTENCE)):
        match = pattern.search(tail)
        if match:
            forms.append(form)
            stop = min(stop, tail_at + match.start())
    fields = _fields(head[:start]) if start else {}
    return Wrapping(start, stop, tuple(forms), fields)


def declared_encoding(head: bytes) -> str | None:
    """The character set that a header names, in its own words."""
    match = _ENCODING.search(head[:HEAD])
    return match[1].decode("ascii", "replace").strip() if match else None


def _fields(head: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in _FIELD.findall(head):
        found.setdefault(name.decode().lower(), " ".join(value.decode("utf-8", "replace").split()))
    return found
