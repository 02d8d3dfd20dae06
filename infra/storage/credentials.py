"""Secrets inside addresses, which results, messages and the list of processes would show to others."""

import re

_USER_AND_PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]*@|https?://[^/?#\s]+@")
_IN_QUERY = re.compile(
    r"://\S*[?&][^=&\s]*(?:passw|pwd|secret|token|credential|access_?key|signature|\bsig\b)[^=&\s]*=", re.I
)


def has_secret(text: str) -> bool:
    """Whether ``text`` has an address with a password, a token or a key in it.

    The user of a web address counts, because services take a token there; that of a database or a bucket does not
    (``gs://anonymous@bucket``).
    """
    return bool(_USER_AND_PASSWORD.search(text) or _IN_QUERY.search(text))
