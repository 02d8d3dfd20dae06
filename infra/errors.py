"""The exception for a user's mistake, and the first line of any other exception."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what was asked for: one sentence that names the file or flag and the next step.

    Of no other kind, so that only code that knows of it can catch it: storage that fails raises it, too.
    """


def first_line(failure: BaseException) -> str:
    return (str(failure) or type(failure).__name__).splitlines()[0]


def nearest(text: str, known: Iterable[str]) -> str:
    """The end of a sentence that suggests the ``known`` names most like ``text``, or lists all of them."""
    known = list(known)
    close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}."
