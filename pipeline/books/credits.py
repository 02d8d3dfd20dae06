"""Removal of the additions by editors of an electronic text: credits before a book, notes before and after it."""

import re
from collections import Counter
from collections.abc import Iterator

from pipeline.books.normalization import count_characters

SHORT_TEXT_BYTES = 300
"""Maximum size in bytes of text beside wrapping that is not a book: a title above a header, names below a license."""
FRONT_MATTER_BYTES = 5_000
"""Bytes after the header that are searched for credits and transcribers' notes."""
BOOK_PARAGRAPH_BYTES = 500
"""Minimum size in bytes of a paragraph that belongs to the book; credits are before it."""
MAX_CREDIT_BYTES = 2_000
"""Maximum size in bytes of a paragraph of credits; a longer one is a text on one line that begins like credits."""
MAX_NOTE_BYTES = 12_000
"""Maximum size in bytes of a transcriber's note at the end of a text."""

OPENING = re.compile(
    rb"^(?:\*{40,}\n)?[ \t*_]*(?:(?:This is )?(?:[Tt]he )?Project Gutenberg"
    rb"(?:(?:'s|\xe2\x80\x99s)?,? (?:E-?[Tt]ext|[Ee]-?[Bb]ook)(?: of\b|,|\*|$)"
    rb"|(?:'s|\xe2\x80\x99s) [A-Z][^\n]*\n?[^\n]*\bby )"
    rb"|This E-?text file is presented by Project Gutenberg|THIS EBOOK WAS ONE OF PROJECT GUTENBERG)", re.M
)  # fmt: skip
"""Pattern of the first line of a header."""

_PARAGRAPH = re.compile(rb"\n*([^\n]+(?:\n[^\n]+)*)(?:\n|\Z)")
# Words that only makers and publishers of electronic texts write.
_ELECTRONIC = re.compile(
    rb"\be-?(?:text|book)s?\b|project gutenberg|gutenberg\.|\bpgdp|\bpg (?:version|distributed|has)|\bhtml?\b"
    rb"|distributed proofread|proofreading team|archive\.org|internet archive|hathi ?trust|set encoding:"
    rb"|this file was (?:first posted|produced|last updated)|free ?literature|[\w.]@[\w-]+\.\w"
)
_PRODUCTION = re.compile(
    rb"\be-?(?:text|book)s?(?: is| was)? (?:prepared|produced|transcribed|scanned)|this project gutenberg|\bpgdp\."
    rb"|distributed proofread|archive\.org/|set encoding:|this file was (?:first posted|produced|last updated)"
)
_CREDIT = re.compile(
    rb"[|\s*\[(_]*(?:(?:this )?(?:project gutenberg(?:'s)? )?(?:e-?text|e-?book|text file|file)\b"
    rb"|(?:e-?text )?credits?\b|produced by|prepared by|transcribed (?:from|by|and)|digiti[sz]ed by|scanned (?:and|by)"
    rb"|typed (?:in )?by|keyed|converted|html version|ocr(?:ed)?\b|proof(?:ed|read)|updated|last updated"
    rb"|(?:many |special )?thanks to|modified for|images? (?:generously|of the)"
    rb"|note: (?:images|project|this|the original|there is)|there is an improved|an? (?:alternative )?edition of this"
    rb"|pg (?:version|has)|see \d+-|see transcriber|\(?https?://|\*{20,}|[a-z ]*executive director|produit par"
    rb"|produzido por|producido por|prodotto da|hergestellt (?:von|durch)|geproduceerd door|producerad av|produceret af"
    rb"|tuottanut)"
)
# Credits of people and teams that mention nothing electronic: apart from names, they consist of _CREDIT_WORDS.
_PEOPLE_CREDIT = re.compile(rb"[|\s*\[(_]*(?:produced|transcribed|digiti[sz]ed|scanned|typed|proof(?:ed|read))\b")
_WORD = re.compile(rb"(?<![\w@./\x80-\xff-])[a-z][a-z'-]+(?![\w@/\x80-\xff])")
_CREDIT_WORDS = frozenset(
    b"an and are as at available by edition email for from generously images in made of on online or page pages "
    b"proofed proofing proofread scans team text the this to version volume was were which with".split()
)
_ON_STAGE = re.compile(rb"theat(?:re|er)|opera|playhouse|on the (?:stage|evening)")
_SEE_NOTE = re.compile(rb"[|\s*\[(_]*see transcriber")
_APOSTROPHE = rb"(?:'|\xe2\x80\x99)?"
_NOTE = re.compile(
    rb"[|\s*=\[({_+-]*(?:the )?(?:transcriber|transcription|scanner|proofreader|redactor)"
    + (_APOSTROPHE + rb"s?" + _APOSTROPHE)
    + rb" notes?\b"
)
# A transcriber's note contains neither the opening of a book nor headings that may follow a closing note.
_OPENS_BOOK = re.compile(rb"[\s_*=]*(?:chapter|book|part|act|preface|contents)(?![a-z])", re.I)
_BACK_MATTER = re.compile(
    rb"[\s_*=\[]*(?:footnotes?|endnotes?|index|appendi(?:x|ces)|glossary|advertisements?|epilogue|conclusion|finis"
    rb"|the end)(?![a-z]).{0,20}\Z"
)
# Topics of a transcriber's note; each of its paragraphs mentions one.
_NOTE_TOPICS = re.compile(
    rb"typo|punctuat|hyphen|spelling|spelled|italic|underscore|underlined|transcri|e-?text|e-?book|copyright|footnotes"
    rb"|illustration|ligature|superscript|small[ -]cap|capital letters|diacritic|accent|errata|misprint|discrepanc"
    rb"|inconsisten|correct|chang(?:ed|es)\b|replaced|amended|standardi[sz]ed|normali[sz]ed|regulari[sz]ed|retained"
    rb"|preserved|removed|moved to|should (?:possibly |probably )?(?:be|read)|cross-reference|incomplete|indicated by"
    rb"|denoted|enclosed (?:in|by)|preceded by|original(?:ly)? (?:text|book|print)|(?:as|in|of) (?:the |this )?original"
    rb"|(?:as|in|of) (?:the |this )?print|bold|equals? signs?|archaic|erroneous|repeated word|unclear|listed"
    rb"|\b(?:pages?|pgs?\.?|pp?\.|psge|paragraph|lines?)\s*\d|-+>|=>|\bhtml|archive\.org|(?:at|to) the end\b"
    rb"|_[^\W_][^_\n]*_|=[^\W_][^=\n]*="
)
MAX_EXAMPLE_BYTES = 200
"""Maximum size in bytes of a paragraph without a topic in a transcriber's note, such as an example."""
_NOTES_BY_DIRECTOR = re.compile(rb"Executive Director's Notes:.{0,4000}?\nExecutive Director\n", re.S)


def find_note_start(text: bytes, start: int, stop: int, removed: Counter[str]) -> int:
    """Return the start of a transcriber's note at the end of ``text[start:stop]``; ``stop`` if there is none.

    All text after the heading must belong to the note, and the note must be at most a quarter of the text.
    """
    offset = max(start + FRONT_MATTER_BYTES, stop - MAX_NOTE_BYTES, stop - (stop - start) // 4)
    lower = text[offset:stop].lower() if offset < stop else b""
    word_start = lower.find(b"transcriber")
    while word_start >= 0:
        line = lower.rfind(b"\n", 0, word_start) + 1
        begins_paragraph = line >= 2 and lower[line - 2 : line] == b"\n\n"
        if begins_paragraph and _NOTE.match(lower, line) and _is_note(text[offset + line : stop]):
            begin = offset + len(lower[:line].rstrip(b" *\t\n"))
            removed["closing note"] += count_characters(text[begin:stop].strip())
            return begin
        word_start = lower.find(b"transcriber", word_start + 1)
    return stop


def _is_note(text: bytes) -> bool:
    """Return whether ``text``, which begins like a transcriber's note, only consists of that note."""
    bracket = _find_bracket_end(text, 0) or 0
    if text.lstrip().startswith(b"[") and text.rstrip().endswith(b"\n]"):
        bracket = len(text)  # Quotations in the note may contain unclosed brackets.
    inside = [match[1] for match in _PARAGRAPH.finditer(text[:bracket])][1:]
    if any(_OPENS_BOOK.match(paragraph) for paragraph in inside):
        return False
    is_after_example = False
    for match in _PARAGRAPH.finditer(text, bracket):
        paragraph = match[1].lower()
        if not re.search(rb"\w", paragraph) or (not bracket and match.start() == 0):
            continue
        if _is_book_heading(match[1]):
            return False
        if _NOTE_TOPICS.search(paragraph):
            is_after_example = False
        elif is_after_example or bracket or len(paragraph) > MAX_EXAMPLE_BYTES:
            return False
        else:
            is_after_example = True
    return not is_after_example


def _is_book_heading(paragraph: bytes) -> bool:
    """Return whether ``paragraph`` is the heading of a part of the book, and not of a note."""
    return bool(_OPENS_BOOK.match(paragraph) or _BACK_MATTER.match(paragraph.lower()) or paragraph.isupper())


def remove_credits(front: bytes, removed: Counter[str]) -> bytes:
    """Return the beginning of a book without credits, notes about the file and transcribers' notes."""
    if b"Executive Director's Notes:" in front:
        shorter = _NOTES_BY_DIRECTOR.sub(b"", front)
        removed["credits"] += len(front) - len(shorter)
        front = shorter
    lower = front.lower()
    last_mention = max(lower.rfind(b"note"), lower.rfind(b"world library, inc"))
    kept_paragraphs: list[bytes] = []
    position = 0
    for begin, end, paragraph in _iterate_paragraphs(lower):
        if begin < position:
            continue
        is_below_title = sum(map(len, kept_paragraphs)) <= SHORT_TEXT_BYTES
        if len(paragraph) > MAX_CREDIT_BYTES or (kept_paragraphs and begin > last_mention and not is_below_title):
            break
        stop, rule = None, "credits"
        if _NOTE.match(paragraph):
            stop, rule = _find_note_end(front, begin, end), "opening note"
        elif b"world library, inc" in paragraph or (
            is_below_title and _is_credit(front[begin:end], paragraph, is_first=not kept_paragraphs)
        ):
            stop = end
        elif not kept_paragraphs and len(paragraph) <= SHORT_TEXT_BYTES and OPENING.match(front, begin):
            stop, rule = end, "header"
        if stop is None:
            kept_paragraphs.append(front[position:end])
            if len(paragraph) > BOOK_PARAGRAPH_BYTES or paragraph.startswith(b"chapter"):
                position = end
                break
        else:
            removed[rule] += count_characters(front[begin:stop].strip())
        position = stop or end
    return b"".join([*kept_paragraphs, front[position:]])


def _is_credit(paragraph: bytes, lower: bytes, *, is_first: bool) -> bool:
    """Return whether ``paragraph`` names the makers of the electronic text, or the location of other versions.

    A paragraph after a title (not ``is_first``) must name both people and an electronic text.
    """
    beginning = _CREDIT.match(lower)
    if beginning and _ELECTRONIC.search(lower):
        return is_first or b" by " in lower
    if not is_first:
        return False
    if _PRODUCTION.search(lower) or _SEE_NOTE.match(lower):
        return True
    return bool(
        beginning
        and _PEOPLE_CREDIT.match(lower)
        and not _ON_STAGE.search(lower)
        and _CREDIT_WORDS.issuperset(_WORD.findall(paragraph))
    )


def _iterate_paragraphs(front: bytes, offset: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Yield bounds and text of the complete paragraphs in ``front``, from ``offset``."""
    for match in _PARAGRAPH.finditer(front, offset):
        if match.end() == len(front) == FRONT_MATTER_BYTES:
            return
        yield match.start(1), match.end(), match[1]


def _find_note_end(front: bytes, begin: int, end: int) -> int:
    """Return the end of the note that begins with the paragraph ``front[begin:end]``, or of its closing bracket.

    A bare heading includes the next paragraph. Indented paragraphs continue the note, up to two empty lines or the
    opening of a book.
    """
    bracket = _find_bracket_end(front, begin)
    if bracket is not None:
        return bracket
    is_bare_heading = not re.search(rb"\w", _NOTE.sub(b"", front[begin:end].lower(), count=1))
    for paragraph_start, paragraph_end, paragraph in _iterate_paragraphs(front, end):
        is_continuation = is_bare_heading or (paragraph_start - end < 2 and paragraph[:1] in b" \t")
        is_list = front[begin:end].rstrip().endswith(b":") and not is_bare_heading
        if (
            not is_continuation
            or _is_book_heading(paragraph)
            or not (is_list or _NOTE_TOPICS.search(paragraph.lower()))
        ):
            break
        end, is_bare_heading = paragraph_end, False
    return end


def _find_bracket_end(text: bytes, begin: int) -> int | None:
    """Return the end of the bracket that opens at ``begin`` (after spaces); None if there is no closed bracket."""
    opening = text[begin : begin + 40].lstrip()
    if not opening.startswith(b"["):
        return None
    depth = 0
    for match in re.finditer(rb"[\[\]]", text[begin : begin + MAX_NOTE_BYTES]):
        depth += 1 if match[0] == b"[" else -1
        if depth == 0:
            return begin + match.end()
    return None
