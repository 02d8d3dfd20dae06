"""Conversion of bytes in any encoding to UTF-8.

Valid UTF-8 is not decoded. Other text is decoded with the encoding that its header declares if the bytes agree with it,
or else with the most likely encoding. If some lines are UTF-8, each line is decoded separately.
"""

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from unicodedata import category

import numpy as np
import pyarrow as pa

from pipeline.books.gutenberg import declared_encoding

_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\0\0", "utf-32-le"), (b"\0\0\xfe\xff", "utf-32-be"),  # before UTF-16, whose mark it begins with
    (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"),
)  # fmt: skip
# Codecs of Python that decode bytes but are not encodings of text.
_NOT_ENCODINGS = ("idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape")
_REPLACEMENT_CHARACTER = "\ufffd"
# Supersets that the WHATWG Encoding Standard uses instead of these encodings.
_SUPERSETS = {
    "iso8859-1": "cp1252", "iso8859-9": "cp1254", "tis-620": "cp874", "iso8859-11": "cp874", "gb2312": "gb18030",
    "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
_WINDOWS_CODEC = "cp1252"
_DETECTION_SAMPLE_BYTES = 32_000
MIN_NON_ASCII_BYTES = 10
"""Minimum number of non-ASCII bytes to detect an encoding; of 36 texts with fewer bytes, 13 were decoded wrongly."""
_MIN_BYTES_TO_GUESS = 4
"""Minimum number of non-ASCII bytes to guess an encoding other than Windows-1252; fewer bytes fit any encoding."""
_MIN_BYTES_TO_OVERRULE = 60
"""Minimum number of non-ASCII bytes to reject a declared encoding in which the letters form words."""
_MAX_JUDGED_CHARACTERS = 1_000
"""Number of non-ASCII characters by which a decoded text is judged."""
_IPA, _GREEK, _CJK = "\u0250", "\u0370", "\u2e80"
"""First characters after the Latin letters, of all other scripts, and of the scripts without spaces between words."""
_WORDS_OF_ONE_LETTER = frozenset("àáâãéèêíóòôúùåæøöýÀÁÂÉÈÊÍÓÒÔÚÅÆØÖÝªº")
_NON_ASCII = re.compile(r"[^\x00-\x7f]")
_ISOLATED_NON_ASCII = re.compile(r"(?<!\ufffd)[^\x00-\x7f\ufffd](?!\ufffd)")
_UNDECODED = re.compile("[\udc80-\udcff]+")


@dataclass(frozen=True)
class Decoded:
    """Decoded text. ``encoding`` is the name of the codec, or the names of the lines' codecs joined by "and"."""

    text: bytes
    encoding: str
    replaced_bytes: int = 0
    """Number of undecodable bytes, each replaced with U+FFFD."""
    is_guessed: bool = False
    """Whether no encoding is declared, and the text has too few non-ASCII bytes to detect it."""
    contradicted_encoding: str | None = None
    """Encoding that the text's header declares, if its bytes are in another encoding; else None."""


def to_utf8(data: bytes, *, declared: str | None = None, sample: Callable[[], bytes] | None = None) -> Decoded:
    """Convert ``data`` to UTF-8 without a byte order mark; undecodable bytes become U+FFFD and are counted.

    Args:
        data: bytes of a text.
        declared: encoding that the file format prescribes; by default a header in ``data`` may declare one.
        sample: returns lines of the same file (see :func:`undecodable_lines`), which help to detect the encoding.
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            if encoding != "utf-8":
                return _decode(data[len(mark) :], encoding)
            data = data[len(mark) :]
    if data.isascii() or is_utf8(data):
        return Decoded(data, "utf-8")
    header_encoding = declared or declared_encoding(data)
    codec = _find_codec(header_encoding)
    decoded = _decode_other(data, codec, sample() if sample else b"")
    if declared or not codec or {codec, "utf-8"} & set(decoded.encoding.split(" and ")):
        return decoded
    return replace(decoded, contradicted_encoding=header_encoding)


def is_utf8(data: bytes) -> bool:
    """Return whether ``data`` is valid UTF-8. Arrow's check is 25 times as fast as decoding."""
    offsets = pa.array([0, len(data)], pa.int64()).buffers()[1]
    try:
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def undecodable_lines(data: bytes) -> bytes:
    """Return lines of ``data`` that are more likely in another encoding than in UTF-8, as many as detection needs."""
    lines = bytearray()
    for line in data.splitlines(keepends=True):
        if not line.isascii() and not _is_mostly_utf8(line):
            lines += line[:_DETECTION_SAMPLE_BYTES]
        if len(lines) >= _DETECTION_SAMPLE_BYTES:
            break
    return bytes(lines)


def _decode(data: bytes, encoding: str) -> Decoded:
    text = data.decode(encoding, "replace")
    replacement_count = data.count(_REPLACEMENT_CHARACTER.encode()) if encoding == "utf-8" else 0
    return Decoded(text.encode("utf-8", "replace"), encoding, text.count(_REPLACEMENT_CHARACTER) - replacement_count)


def _decode_other(data: bytes, declared: str | None, sample: bytes) -> Decoded:
    """Decode ``data``, which is not valid UTF-8, with one encoding; line by line if parts of it are UTF-8."""
    lines = undecodable_lines(data)
    valid_count, invalid_count = _count_utf8(data)
    codec, is_guessed = _choose_codec(lines, declared, sample, is_mixed=valid_count > 0) if lines else ("utf-8", False)
    if not valid_count:
        codec = codec or (declared if declared != "ascii" else None) or ("utf-8" if is_guessed else _detect(lines))
        return replace(_decode(data, codec), is_guessed=is_guessed and codec != "utf-8")
    default_codec = codec if codec and invalid_count > valid_count else "utf-8"
    has_windows_bytes = _has_windows_bytes(data.decode("utf-8", "surrogateescape"))
    decoded_lines = [
        _decode_line(line, codec or "utf-8", default_codec, can_repair=has_windows_bytes)
        for line in data.splitlines(keepends=True)
    ]
    used_codecs = {name for line in decoded_lines if not line.text.isascii() for name in line.encoding.split(" and ")}
    return Decoded(
        b"".join(line.text for line in decoded_lines),
        " and ".join(sorted(used_codecs)),
        sum(line.replaced_bytes for line in decoded_lines),
        is_guessed and codec in used_codecs,
    )


def _count_utf8(data: bytes) -> tuple[int, int]:
    """Return (non-ASCII characters that are valid UTF-8 in ``data``, runs of bytes that are not)."""
    text = data.decode("utf-8", "replace")
    invalid_count = text.count(_REPLACEMENT_CHARACTER) - data.count(_REPLACEMENT_CHARACTER.encode())
    return len(text) - invalid_count - (len(data) - _count_non_ascii(data)), invalid_count


def _is_mostly_utf8(line: bytes) -> bool:
    """Return whether ``line`` is UTF-8, possibly damaged.

    In other encodings, bytes that are valid UTF-8 by chance are beside invalid ones.
    """
    text = line.decode("utf-8", "replace")
    return len(_ISOLATED_NON_ASCII.findall(text)) * 4 >= text.count(
        _REPLACEMENT_CHARACTER
    ) and _has_plausible_positions(text.replace(_REPLACEMENT_CHARACTER, "?"))


def _decode_line(line: bytes, codec: str, default_codec: str, *, can_repair: bool) -> Decoded:
    """Decode ``line`` as UTF-8 or with ``codec``, whichever gives words, or else with ``default_codec``.

    With ``can_repair``, a single byte that is not UTF-8 is decoded as Windows-1252, if the character fits there.
    """
    if line.isascii():
        return Decoded(line, "utf-8")
    text = line.decode("utf-8", "surrogateescape")
    damage = _UNDECODED.search(text)
    # A few bytes may be valid UTF-8 by chance.
    if not damage and (_count_non_ascii(line) >= MIN_NON_ASCII_BYTES or _has_plausible_positions(text)):
        return Decoded(line, "utf-8")
    if codec != "utf-8" and not (damage and _is_mostly_utf8(line)):
        decoded = _decode(line, codec)
        if _is_plausible(decoded.text.decode()):
            return decoded
        line_codec = _choose_codec(line, None)[0] if _count_non_ascii(line) >= MIN_NON_ASCII_BYTES else None
        if line_codec or default_codec != "utf-8":
            return _decode(line, line_codec or codec)
    if not damage:
        return Decoded(line, "utf-8")
    repaired_text = _UNDECODED.sub(lambda match: _decode_as_windows(match) or match[0], text) if can_repair else text
    undecoded_lengths = [len(match[0]) for match in _UNDECODED.finditer(repaired_text)]
    encoding = "utf-8" if repaired_text == text else f"{_WINDOWS_CODEC} and utf-8"
    return Decoded(
        _UNDECODED.sub(lambda match: _REPLACEMENT_CHARACTER * len(match[0]), repaired_text).encode(),
        encoding,
        sum(undecoded_lengths),
    )


def _has_windows_bytes(text: str) -> bool:
    """Return whether the undecodable bytes of ``text``, which are surrogates in it, are Windows-1252 and not damage."""
    fits = [
        _decode_as_windows(match) is not None for match in islice(_UNDECODED.finditer(text), _MAX_JUDGED_CHARACTERS)
    ]
    return sum(fits) > max(1, len(fits) // 2)


def _decode_as_windows(match: re.Match[str]) -> str | None:
    """Decode an undecodable byte as Windows-1252; return None if the character does not fit between its neighbors."""
    char = match[0].encode("utf-8", "surrogateescape").decode(_WINDOWS_CODEC, "replace")
    preceding, following = match.string[match.start() - 1 : match.start()], match.string[match.end() : match.end() + 1]
    return char if len(char) == 1 and _is_plausible_between(preceding, char, following) else None


def _find_codec(name: str | None) -> str | None:
    """Return the codec for the name of an encoding; None if it is unknown or not a superset of ASCII."""
    name = (name or "").lower().replace("iso latin-1", "latin-1")
    try:
        codec = codecs.lookup(name).name
        if codec in _NOT_ENCODINGS or "az".encode(codec) != b"az":
            return None
    except (LookupError, UnicodeError):  # Some codecs of Python, such as hex, do not decode to text.
        return None
    return _SUPERSETS.get(codec, codec)


def _choose_codec(
    lines: bytes, declared: str | None, sample: bytes = b"", *, is_mixed: bool = False
) -> tuple[str | None, bool]:
    """Choose the encoding of ``lines``: the declared one if its letters form words, else the most likely one.

    Returns:
        (codec, whether it is a guess). The codec is None if no encoding gives words, or if the few non-ASCII bytes of a
        text that is ``is_mixed`` with UTF-8 may be damage.
    """
    letters = max(_count_non_ascii(lines), _count_non_ascii(sample))
    if declared not in (None, "utf-8", "ascii") and _is_plausible_in(declared, lines):
        return (
            _detect(lines) if letters > _MIN_BYTES_TO_OVERRULE and _is_other_script(lines, declared) else declared
        ), False
    if declared == "utf-8" and letters < 2:
        return "utf-8", False  # A single invalid byte is damage.
    is_guessed = letters < MIN_NON_ASCII_BYTES
    if sample and not is_guessed and _count_non_ascii(lines) < MIN_NON_ASCII_BYTES:
        codec = _detect(sample)
        if _has_plausible_positions(lines.decode(codec, "replace")):
            return codec, False
    for evidence in (sample, lines) if sample else (lines,):
        for codec in (_WINDOWS_CODEC, _detect(evidence)) if is_guessed else (_detect(evidence), _WINDOWS_CODEC):
            if is_guessed and codec != _WINDOWS_CODEC and (is_mixed or letters < _MIN_BYTES_TO_GUESS):
                continue
            if _is_plausible_in(codec, lines):
                return codec, is_guessed
    return None, is_guessed


def _is_other_script(lines: bytes, declared: str) -> bool:
    """Return whether ``lines`` are in an encoding other than ``declared``, which decodes them to a non-Latin script.

    Most letters must differ between the encodings, because any bytes form words of Chinese letters, and Russian text
    forms words in every Cyrillic encoding.
    """
    text = lines[:_DETECTION_SAMPLE_BYTES].decode(declared, "replace")
    letters = [char for char in text if char >= _IPA and char.isalpha()]
    if len(letters) * 2 < len(_NON_ASCII.findall(text)):
        return False
    detected_codec = _detect(lines)
    detected_text = lines[:_DETECTION_SAMPLE_BYTES].decode(detected_codec, "replace")
    common_letters = Counter(letters) & Counter(detected_text)
    return common_letters.total() * 2 < len(letters) and _is_plausible(detected_text)


@lru_cache(maxsize=8)  # The sample of a file is used for each of its lines.
def _detect(data: bytes) -> str:
    """Return the most likely encoding of ``data``, by models of 48 languages."""
    import chardet  # Imported here, because few books need its models.

    eras = chardet.EncodingEra.ALL & ~chardet.EncodingEra.MAINFRAME
    encoding = str(chardet.detect(data, encoding_era=eras, compat_names=False)["encoding"] or _WINDOWS_CODEC)
    return _find_codec(encoding) or _WINDOWS_CODEC


def _is_plausible_in(codec: str, data: bytes) -> bool:
    return _is_plausible(data[:_DETECTION_SAMPLE_BYTES].decode(codec, "replace"))


def _is_plausible(text: str) -> bool:
    """Return whether ``text`` consists of words; a different script decoded as Latin gives runs of accented letters."""
    latin_count = crowded_count = 0
    for preceding, char, following in _with_neighbors(text):
        if char < _IPA and char.isalpha():
            latin_count += 1
            crowded_count += any(each.isalpha() and not each.isascii() for each in (preceding, following))
    return (latin_count < 2 or crowded_count * 10 <= latin_count * 6) and _has_plausible_positions(text)


def _has_plausible_positions(text: str) -> bool:
    """Return whether nearly all non-ASCII characters are at plausible positions in and between words."""
    fits = [_is_plausible_between(*neighbors) for neighbors in _with_neighbors(text)]
    return (len(fits) - sum(fits)) * 10 <= len(fits)


def _with_neighbors(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the first non-ASCII characters, each as (preceding character, character, following character)."""
    for match in islice(_NON_ASCII.finditer(text), _MAX_JUDGED_CHARACTERS):
        yield text[match.start() - 1 : match.start()], match[0], text[match.end() : match.end() + 1]


def _is_plausible_between(preceding: str, char: str, following: str) -> bool:
    """Return whether ``char`` is plausible between these two characters."""
    unicode_category = category(char)
    if unicode_category in ("Cc", "Cn", "Co", "Cs") or char == _REPLACEMENT_CHARACTER or _is_table_character(char):
        return False
    if unicode_category[0] in "PZC":
        return True
    if unicode_category[0] in "LM" and (unicode_category != "Lm" or char >= _CJK):
        if (preceding.islower() and char.isupper()) or (char.islower() and following.isupper()):
            return False
        if char >= _GREEK:
            return not any(each < _GREEK and each.isalpha() for each in (preceding, following))
        return preceding.isalpha() or following.isalpha() or char in _WORDS_OF_ONE_LETTER
    return not preceding.isalpha() and (not following.isalpha() or char in "°©®")


def _is_table_character(char: str) -> bool:
    """Return whether ``char`` is a box-drawing character of DOS or half-width katakana, which text rarely contains."""
    return "\u2500" <= char < "\u25a0" or "\uff61" <= char < "\uffa0"


def _count_non_ascii(data: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) > 127))
