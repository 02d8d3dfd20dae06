"""Secrets in URLs, which results, messages and the list of processes would reveal."""

import re

_USER_AND_PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]*@|https?://[^/?#\s]+@")
_IN_QUERY = re.compile(
    r"://\S*[?&][^=&\s]*(?:passw|pwd|secret|token|credential|access_?key|signature|\bsig\b)[^=&\s]*=", re.I
)


def has_secret(text: str) -> bool:
    """Whether ``text`` contains a URL with a password, a token or a key.

    A user name counts in a web address, because some services take a token there, but not in the address of a database
    or a bucket (``gs://anonymous@bucket``).
    """
    return bool(_USER_AND_PASSWORD.search(text) or _IN_QUERY.search(text))
