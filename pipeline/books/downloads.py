"""Fetch Project Gutenberg's plain-text editions by number, politely: a robot-friendly mirror, a pause, a cache."""

import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from infra.errors import UserError
from infra.storage import atomic_file
from pipeline.config import MIRROR

PREFIX = "gutenberg:"
PAUSE = 2.0
"""Seconds between two requests, as its robot policy asks."""
_TIMEOUT = 60.0


def cache_folder() -> Path:
    """Where downloaded books are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "throughline" / "gutenberg"


def fetch(source: str, mirror: str) -> Iterator[Path]:
    """The files of ``gutenberg:1342,84``, downloaded unless the cache has them.

    Raises ``UserError`` for something that is not a number, a number without a plain text, or a mirror that is away.
    """
    numbers = source.removeprefix(PREFIX).split(",")
    for number in numbers:
        if not re.fullmatch(r"[1-9]\d{0,6}", number):
            raise UserError(f"{source}: {number!r} is not a book's number; write for example {PREFIX}1342,84.")
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise UserError(f"{folder} cannot be made ({refused.strerror}): name another with XDG_CACHE_HOME.") from refused
    asked = False
    for number in sorted(set(numbers), key=int):
        path = folder / f"pg{number}.txt"
        if not path.exists():
            if asked:
                time.sleep(PAUSE)
            text = _download(number, mirror)
            asked = True
            with atomic_file(path) as file:
                file.write(text)
        yield path


def _download(number: str, mirror: str) -> bytes:
    folders = "/".join(number[:-1]) or "0"
    names = (
        f"cache/epub/{number}/pg{number}.txt",
        f"{folders}/{number}/{number}-0.txt",
        f"{folders}/{number}/{number}.txt",
    )
    for name in names:
        url = f"{mirror.rstrip('/')}/{name}"
        if not url.startswith(("https://", "http://")):
            raise UserError(f"--mirror {mirror} is not a web address: write for example {MIRROR}.")
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "throughline (corpus preparation)"})  # noqa: S310
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:  # noqa: S310 the scheme is checked above
                kind, text = answer.headers.get_content_type(), answer.read()
        except urllib.error.HTTPError as refused:
            if refused.code != 404:
                raise UserError(
                    f"{url} answers {refused.code} {refused.reason}: try later, or another --mirror."
                ) from refused
        except (OSError, http.client.HTTPException, ValueError) as away:  # ValueError: the address is none
            raise UserError(f"{url} cannot be reached ({away}): check the network, or name another --mirror.") from away
        else:
            if kind == "text/html":  # the login page of a network, for example, which the cache would keep as the book
                raise UserError(f"{url} is a web page and not a book: check the network, or name another --mirror.")
            return text
    raise UserError(f"book {number} has no plain text at {mirror}: leave it out.")
