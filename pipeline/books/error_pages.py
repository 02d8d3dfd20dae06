"""Recognition of servers' error responses that were saved under the name of a book."""

import re

MAX_HTML_BYTES = 20_000
"""Maximum size in bytes of an HTML error page."""
MAX_PLAIN_BYTES = 5_000
"""Maximum size in bytes of an error response without markup."""
_PHRASE = (
    rb"(?:not found|bad (?:request|gateway)|unauthorized|forbidden|access denied|request time-?out|too many requests"
    rb"|internal server error|service (?:temporarily )?unavailable|gateway time-?out|moved (?:permanently|temporarily))"
)
_ERROR_LINE = re.compile(
    rb"\s*(?:http(?:/\d(?:\.\d)?)?[ :]+)?(?:(?:error|status)[ :]*)?[345]\d\d\b[ :.,|(-]*(?:" + _PHRASE
    + rb"|error|found|see other|(?:temporary|permanent) redirect)|\s*(?:error|page|file|object|document)[ :]+" + _PHRASE
    + rb"\s*(?=<|\n|\Z)|\s*the requested (?:url|page|file|resource|document)\b[^<\n]{0,80} not (?:be )?found\b", re.I
)  # fmt: skip
_TITLE = re.compile(
    rb"\s*(?:[45]\d\d\b[^<\n]{0,40}|" + _PHRASE + rb"|just a moment\W*|attention required\b[^<\n]{0,40})\s*(?=<)", re.I
)
_HEADING = re.compile(rb"<(?:title|h1)\b[^<>]*>", re.I)
_MARKUP = re.compile(rb"\s*<(?:!doctype|html|head|\?xml|error)\b", re.I)
_XML_ERROR = re.compile(rb"<Error>\s*<Code>")
_JSON_ERROR = re.compile(rb"\s*\{\s*\"(?:message|error|errors|detail|status|code)\"\s*:[^{}]{0,1000}\}\s*\Z")


def find_error_message(text: bytes) -> str | None:
    """Return the error message in ``text`` if it is an error response; None otherwise."""
    if len(text) > MAX_HTML_BYTES:
        return None
    message = None
    if _MARKUP.match(text):
        headings = [heading.end() for heading in _HEADING.finditer(text)]
        messages = [_ERROR_LINE.match(text, end) or _TITLE.match(text, end) for end in headings]
        message = next(filter(None, messages), None) or _XML_ERROR.search(text)
    elif len(text) <= MAX_PLAIN_BYTES:
        message = _ERROR_LINE.match(text) or _JSON_ERROR.match(text)
    return " ".join(message[0].decode("utf-8", "replace").split())[:80] if message else None
