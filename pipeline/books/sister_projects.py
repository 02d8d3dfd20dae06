"""Wrapping of Project Gutenberg's sister projects: Project Gutenberg Australia and Canada, and Faded Page.

Texts of these projects have no start line. A header is recognized by its paragraphs, which have the name of the
project, fields, and sentences about the file and its use. The closing line is the last line of the text.
"""

import re

MAX_HEADER_BYTES = 6_000
"""Maximum size in bytes of a header."""
_NAME = re.compile(
    rb"\s*+[*\[_ \t]*+(?:An? )?(?:Project Gutenberg (?:of )?(?:Australia|Canada)(?:'s)?"
    rb"|(?:Distributed Proofreaders Canada|Faded ?Page)(?= e-?book))[^\n]{0,60}\n", re.I
)  # fmt: skip
_FIELD = (
    rb"[ \t*_]*(?:(?:title|author|translator|editor|illustrator|language|e-?book no|edition|date|character set)"
    rb"[^\n:]{0,40}:|(?:an? )?(?:project gutenberg|faded ?page|distributed proofreaders)[^\n]{0,40}e-?book\b)[^\n]*"
)
_FIELDS = re.compile(_FIELD + rb"(?:\n(?:[ \t]+[^\n]*|" + _FIELD + rb"))*\Z", re.I)
_FILE_SENTENCE = re.compile(
    rb"[ \t*_\[]*(?:this e-?book (?:is made available|was produced)|this (?:work|file|etext) (?:is in the|was produced)"
    rb"|project gutenberg (?:of )?(?:australia|canada)|copyright laws are changing|a treasure-trove|go to project"
    rb"|to contact project|be sure to check|further information on|production notes|if the book is under copyright"
    rb"|this site is full of free)", re.I
)  # fmt: skip
_PROOF = re.compile(
    rb"e-?book no|e-?book #\s?\d|made available at no cost|date (?:first posted|of first publication)", re.I
)  # fmt: skip
_CLOSING = re.compile(
    rb"\n\s*(?:\[(?:the )?end of ([^\]]{2,300})\]|project gutenberg (?:of )?(?:australia|canada))\s*\Z", re.I
)
_PARAGRAPH = re.compile(rb"\s*?([^\n]+(?:\n[^\n]+)*)(?:\n|\Z)")


def find_header_end(text: bytes) -> int:
    """Return the end of the header at the beginning of ``text``; 0 if there is none."""
    if not _NAME.match(text):
        return 0
    end, has_proof = 0, False
    for match in _PARAGRAPH.finditer(text[:MAX_HEADER_BYTES]):
        if end and not _FIELDS.match(match[1]) and not _FILE_SENTENCE.match(match[1]):
            break
        has_proof = has_proof or bool(_PROOF.search(match[1]))
        end = match.end()
    return end if has_proof else 0


def find_closing_start(text: bytes, start: int, title: str) -> int | None:
    """Return the start of the line that closes the book ``title`` in ``text[start:]``; None if there is none."""
    match = _CLOSING.search(text, max(start, len(text) - 400))
    if match is None or match[1] is None:
        return match.start() if match else None
    closing = match[1].decode("utf-8", "replace").lower()
    words = re.findall(r"\w+", title.lower())[:3]
    return match.start() if words and all(word in closing for word in words) else None
