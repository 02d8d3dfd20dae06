"""Detection of secrets in URLs, which results, messages and the process list would reveal."""

import re

_USER_AND_PASSWORD = re.compile(r"://[^/?#\s]*:[^/?#\s]*@|https?://[^/?#\s]+@")
_IN_QUERY = re.compile(
    r"://\S*[?&][^=&\s]*(?:passw|pwd|secret|token|credential|access_?key|signature|\bsig\b)[^=&\s]*=", re.I
)


def has_secret(text: str) -> bool:
    """Return whether ``text`` contains a URL with a password, a token or a key.

    A user name in a web address counts as a secret, because some services accept a token there. In the address of a
    database or a bucket (``gs://anonymous@bucket``) it does not.
    """
    return bool(_USER_AND_PASSWORD.search(text) or _IN_QUERY.search(text))
