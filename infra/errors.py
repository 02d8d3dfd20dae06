"""The exception for a user's mistake, and the first line of any other exception."""


class UserError(ValueError):
    """A mistake in what was asked for: one sentence that names the file or flag and the next step."""


def first_line(failure: BaseException) -> str:
    """The first line of an exception's text, for a one-line message."""
    return (str(failure) or type(failure).__name__).splitlines()[0]
