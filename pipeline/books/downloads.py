"""Downloads of Project Gutenberg's plain-text editions by number, slowly, from a mirror for robots, into a cache."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import UserError
from infra.storage.files import atomic_file
from pipeline.books.error_pages import find_error_message
from pipeline.books.gutenberg import MAX_HEADER_BYTES, NEAR_HEADER_BYTES
from pipeline.config import MIRROR

if TYPE_CHECKING:
    from requests import Response

SOURCE_PREFIX = "gutenberg:"
"""Prefix of sources that are numbers of books."""
REQUEST_INTERVAL_SECONDS = 2.0
"""Interval between two books, as Project Gutenberg's robot policy requires."""
MAX_RETRIES = 2
"""Number of retries of a request if the connection or the server fails."""
MAX_BOOK_BYTES = 300_000_000
"""Maximum size of a book in bytes. Project Gutenberg's largest book, a human chromosome, has 250 million bytes."""
_TIMEOUT_SECONDS = 60.0
_WEB_PAGE = re.compile(rb"\s*<(?:!doctype html|html)\b", re.I)
_START = re.compile(rb"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG", re.M)
_END = re.compile(rb"^\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG", re.M)


@dataclass(frozen=True)
class Mirror:
    """Mirror of Project Gutenberg, with the limits of requests to it."""

    address: str = MIRROR
    interval_seconds: float = REQUEST_INTERVAL_SECONDS
    retries: int = MAX_RETRIES
    max_book_bytes: int = MAX_BOOK_BYTES
    sleep: Callable[[float], None] = time.sleep


def download_books(source: str, mirror: Mirror) -> Iterator[Path]:
    """Yield the files of a source such as ``gutenberg:1342,84``; download those that are not cached."""
    numbers = source.removeprefix(SOURCE_PREFIX).split(",")
    for number in numbers:
        if not re.fullmatch(r"[1-9]\d{0,6}", number):
            raise UserError(f"{source}: {number!r} is not a book number. Use for example {SOURCE_PREFIX}1342,84.")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "throughline" / "gutenberg"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create {folder}: {error.strerror}. Set XDG_CACHE_HOME to another folder.") from error
    has_requested = False
    for number in sorted(set(numbers), key=int):
        path = folder / f"pg{number}.txt"
        if not path.exists() or find_flaw(path.read_bytes()):
            if has_requested:
                mirror.sleep(mirror.interval_seconds)
            text = _download(number, mirror)
            has_requested = True
            with atomic_file(path) as file:
                file.write(text)
        yield path


def _download(number: str, mirror: Mirror) -> bytes:
    import requests  # Imported here, because few runs download books.
    from requests.adapters import HTTPAdapter
    from urllib3 import Retry

    if not mirror.address.startswith(("https://", "http://")):
        raise UserError(f"--mirror {mirror.address} is not a web address. Use for example {MIRROR}.")
    folders = "/".join(number[:-1]) or "0"
    names = (
        f"cache/epub/{number}/pg{number}.txt",
        f"{folders}/{number}/{number}-0.txt",
        f"{folders}/{number}/{number}.txt",
    )
    # A busy mirror must not get more requests, so 429 and 503 are not retried even if it announces a short wait.
    retry = Retry(
        mirror.retries, status_forcelist=(500, 502, 504), backoff_factor=mirror.interval_seconds / 2,
        respect_retry_after_header=False,
        raise_on_status=False,
    )  # fmt: skip
    with requests.Session() as session:
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        session.headers["User-Agent"] = "throughline (corpus preparation)"
        for name in names:
            url = f"{mirror.address.rstrip('/')}/{name}"
            try:
                response = session.get(url, timeout=_TIMEOUT_SECONDS, stream=True)
                text = _read_body(response, mirror.max_book_bytes) if response.ok else b""
            except (OSError, ValueError) as error:  # requests raises ValueError for an invalid address.
                raise UserError(
                    f"{url} is not reachable ({error}). Check the network, or use another --mirror."
                ) from error
            if response.status_code == 404:
                continue
            if not response.ok:
                raise UserError(
                    f"{url} returned HTTP {response.status_code} {response.reason}. Try again later, or use another "
                    "--mirror."
                )
            if text is None:
                raise UserError(
                    f"{url} is larger than {mirror.max_book_bytes:,} bytes, the limit for a book. Remove its number "
                    "from the sources."
                )
            if reason := _find_response_flaw(response) or find_flaw(text):
                raise UserError(f"{url} {reason}. Check the network, try again later, or use another --mirror.")
            return text
    raise UserError(f"Book {number} has no plain-text edition at {mirror.address}. Remove its number from the sources.")


def find_flaw(text: bytes) -> str | None:
    """Return the reason why ``text`` is not a complete book; None if it seems to be complete."""
    if not text.strip():
        return "is empty"
    if error := find_error_message(text):
        return f"is an error page ({error!r}) instead of a book"
    if _WEB_PAGE.match(text):
        return "is an HTML page instead of a book"  # A network may redirect requests to its login page.
    if b"\0" in text[:NEAR_HEADER_BYTES] and not text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is not text"
    if _START.search(text, 0, MAX_HEADER_BYTES) and not _END.search(text):
        return "is truncated (its end line is missing)"
    return None


def _find_response_flaw(response: "Response") -> str | None:
    """Return the reason why the headers of ``response`` do not belong to a complete text; None if they do."""
    kind = response.headers.get("Content-Type", "").lower()
    if any(name in kind for name in ("html", "xml", "json")):
        return f"is {kind.partition(';')[0]} instead of plain text"
    length = response.headers.get("Content-Length")
    if (
        length
        and length.isdigit()
        and "Content-Encoding" not in response.headers
        and int(length) != response.raw.tell()
    ):
        return f"is truncated ({response.raw.tell():,} of {length} bytes were received)"
    return None


def _read_body(response: "Response", max_bytes: int) -> bytes | None:
    """Return the decompressed body of ``response``; stop and return None above ``max_bytes`` bytes."""
    data = bytearray()
    with response:
        for block in response.iter_content(1 << 20):
            data += block
            if len(data) > max_bytes:
                return None
    return bytes(data)
