"""The exception for invalid input and failing storage, and texts for error messages."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix: its message names the file or flag, and the next step.

    Failing storage raises it, too. It has no other base class, so that code cannot catch it by accident.
    """


def first_line(failure: BaseException) -> str:
    """Return the first line of an exception's message, with the next one if it ends with a colon.

    The name of the exception's type replaces an empty message.
    """
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def suggest_nearest(text: str, names: Iterable[str]) -> str:
    """Return the end of a message that suggests the ``names`` most similar to ``text``, or lists all of them."""
    names = list(names)
    matches = difflib.get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    return f". Did you mean {' or '.join(matches)}?" if matches else f". Choose from {', '.join(names)}."
