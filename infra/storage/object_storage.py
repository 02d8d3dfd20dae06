"""Files in object storage (S3, Google Cloud Storage, Azure, the Hugging Face Hub), by their URIs.

URIs are ``s3://bucket/path``, ``gs://...``, ``az://container/path`` or, read-only, ``hf://datasets/...``. Their query
has settings of obstore, such as ``?endpoint=http://127.0.0.1:9000&region=us-east-1``. obstore retries failing requests
for a limited time, after which they raise ``UserError``.
"""

import io
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from infra.errors import UserError, first_line
from infra.storage.credentials import has_secret
from infra.storage.hub import Hub

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "hf")
"""Schemes of URIs in object storage."""

REQUEST_SECONDS = 60.0
"""Time limit of a request with its response. Four simultaneous parts of 8 MiB take half of it at 1 MB/s."""

RETRY_TIMEOUT_SECONDS = 240.0
"""Time for which a failing request is retried. A partition of the network may last a minute."""

WARN_AFTER_SECONDS = 10.0
"""Time after which the user is informed of a request without a response."""

_BLOCK_BYTES = 8 << 20
"""Size of the parts in which files are transferred."""

_last_warning = [float("-inf")]
"""Time of the last warning about a slow request; one warning is enough for many simultaneous requests."""


@dataclass(frozen=True)
class FileInfo:
    """File in a listing of object storage."""

    path: str
    """Name of the bucket and path in the bucket."""
    size: int
    """Size of the file in bytes."""
    modified: int
    """Time of modification in nanoseconds since the epoch; 0 if it is unknown."""
    version: str
    """Entity tag of the file; empty if the storage has none."""


def is_remote(uri: str) -> bool:
    """Return whether ``uri`` is in object storage."""
    return urlsplit(uri).scheme in SCHEMES and "://" in uri


def locate(uri: str) -> tuple[Any, str, str]:
    """Resolve a ``uri`` in object storage.

    Raises ``UserError`` for a URI that is malformed, or that contains a secret key, because the manifest and MLflow
    store URIs.

    Returns:
        (store, bucket, path in the bucket with percent-encoding decoded).
    """
    parts = urlsplit(uri)
    user, _, bucket = parts.netloc.rpartition("@")
    if not bucket:
        raise UserError(f"{uri} has no bucket. Use a URI such as {parts.scheme}://bucket/folder.")
    if has_secret(uri):
        raise UserError(
            f"The URI of the bucket {bucket} contains a secret key, which would be stored with the results. Remove it "
            "and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the environment variables of your storage."
        )
    query = parts.query + ("&skip_signature=true" if user == "anonymous" else "")
    return _open_store(f"{parts.scheme}://{bucket}", query), bucket, unquote(parts.path).strip("/")


@cache
def _open_store(bucket: str, query: str) -> Any:
    """Create the store of a bucket; the result is cached, so that connections are reused."""
    if bucket.startswith("hf://"):
        return Hub(bucket.removeprefix("hf://"))
    settings: dict[str, Any] = dict(parse_qsl(query))
    try:
        if bucket.startswith("s3://") and "skip_signature" not in settings:
            settings |= _load_credentials()
        return from_url(
            bucket,
            # Plain HTTP is only used if the endpoint begins with http://.
            client_options={"allow_http": True, "timeout": timedelta(seconds=REQUEST_SECONDS)},
            retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_SECONDS)},
            **settings,
        )
    except (BaseError, ValueError) as failure:
        reason = first_line(failure).rstrip(".")
        raise UserError(f"Cannot open {bucket}?{query}: {reason}. Check the settings after the '?'.") from failure


def _load_credentials() -> dict[str, Any]:
    """Return the credentials of a profile in ``~/.aws``, which only boto3 reads, if the environment has none.

    Raises ``ValueError`` if the profile does not exist.
    """
    if any(map(os.environ.get, ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"))) or not find_spec("boto3"):
        return {}
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # Without credentials, obstore tries the machine's role.
        return {}
    except BotoCoreError as failure:
        raise ValueError(str(failure)) from failure


def run_request(uri: str, action: Callable[[], T], action_name: str = "read") -> T:
    """Run ``action``, which calls obstore, in a thread, because Ctrl-C cannot interrupt obstore's calls.

    Raises ``FileNotFoundError``, obstore's errors of conditional writes, and ``UserError`` with the ``action_name`` if
    the storage denies access or keeps failing.
    """
    response: Future[T] = Future()

    def work() -> None:
        try:
            response.set_result(action())
        except BaseException as failure:  # noqa: BLE001 raised in the calling thread
            response.set_exception(failure)

    threading.Thread(target=work, name="storage", daemon=True).start()
    if not wait([response], WARN_AFTER_SECONDS).done:
        _warn_slow(uri)
    try:
        return response.result()
    except (FileNotFoundError, AlreadyExistsError, PreconditionError):
        raise
    except (UnauthenticatedError, PermissionDeniedError) as failure:
        raise UserError(
            f"{uri} cannot be {action_name}: {error_reason(failure)}. Check the address and your credentials."
        ) from failure
    except InvalidPathError as failure:  # obstore can neither list nor read names with an empty part.
        raise UserError(
            f"{uri} cannot be {action_name}: the name of an object there has an empty part (//) or a control character "
            f"({error_reason(failure)}). Rename or remove the object, or use the folders next to it."
        ) from failure
    except _failure_types(uri) as failure:
        raise UserError(
            f"{uri} cannot be {action_name}: {error_reason(failure)}. Check the address, your credentials and the "
            "network, then run the same command again to continue."
        ) from failure


def _warn_slow(uri: str) -> None:
    if time.monotonic() - _last_warning[0] < RETRY_TIMEOUT_SECONDS:
        return
    _last_warning[0] = time.monotonic()
    from infra.cli.console import errors  # Imported late, because most tokenizer processes never print.

    errors.print(
        f"No response from {uri} after {WARN_AFTER_SECONDS:.0f} s; retrying for up to "
        f"{RETRY_TIMEOUT_SECONDS + REQUEST_SECONDS:.0f} s. Press Ctrl-C to exit.",
        markup=False,
    )


def error_reason(failure: BaseException) -> str:
    """Return the storage's own message in an error, without the XML around it and the details of the request."""
    if message := re.search(r"<Message>(.*?)</Message>", str(failure), re.S):
        return message[1].rstrip(".")
    return re.sub(r"^Generic \w+ error: |, max_retries: \d+, retry_timeout: \w+", "", first_line(failure)).rstrip(".")


def _failure_types(uri: str) -> tuple[type[Exception], ...]:
    """Return the exceptions that failing storage at ``uri`` raises, for the Hugging Face Hub also its HTTP client's."""
    if urlsplit(uri).scheme != "hf":
        return (BaseError, OSError)
    from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage]

    return (OSError, HTTPError)


def list_files(uri: str) -> list[FileInfo]:
    """List the file at ``uri``, or all files in the folder ``uri``. Raises ``UserError`` if the request fails."""
    store, bucket, path = locate(uri)

    def list_entries() -> list[Any]:
        if path:
            with suppress(FileNotFoundError):
                return [store.head(path)]
        entries = (entry for page in store.list(path) for entry in page)
        return [entry for entry in entries if entry["path"] != path]  # S3's console creates a folder as an empty file.

    return [
        FileInfo(
            f"{bucket}/{entry['path']}",
            entry["size"],
            int(entry["last_modified"].timestamp() * 1e9) if entry["last_modified"] else 0,
            _entity_tag(entry),
        )
        for entry in run_request(uri, list_entries, "listed")
    ]


def _entity_tag(meta: Any) -> str:
    """Return the entity tag of a file without quotes, which Azure's listings omit; empty if the file has none."""
    return (meta["e_tag"] or "").removeprefix("W/").strip('"')


def file_size(uri: str) -> int:
    """Return the size of a file in bytes. Raises ``FileNotFoundError`` if it is missing."""
    return _read_metadata(uri)["size"]


def _read_metadata(uri: str) -> Any:
    store, _, path = locate(uri)
    return run_request(uri, lambda: store.head(path))


def read(uri: str) -> bytes:
    """Return the content of a file. Raises ``FileNotFoundError`` if it is missing."""
    return open_file(uri).read() if isinstance(locate(uri)[0], Hub) else read_version(uri)[0]


def read_version(uri: str) -> tuple[bytes, dict[str, Any]]:
    """Read a file that is to be replaced by a conditional write. Raises ``FileNotFoundError`` if it is missing.

    Returns:
        (content, version for the ``mode`` of :func:`write`).
    """
    store, _, path = locate(uri)

    def get() -> tuple[bytes, dict[str, Any]]:
        response = store.get(path)
        return response.bytes().to_bytes(), {"e_tag": response.meta["e_tag"], "version": response.meta["version"]}

    return run_request(uri, get)


def write(uri: str, content: bytes | memoryview | Path, mode: Any = "overwrite") -> dict[str, Any]:
    """Write ``content``, or the local file at that path, to a file and return the new version.

    ``mode`` is obstore's: with ``create`` the file must not exist; with a version, the file must have that version.
    """
    store, bucket, path = locate(uri)
    if isinstance(mode, dict):
        mode = {name: value for name, value in mode.items() if value}  # S3 has tags only, and the version is None.
    if isinstance(store, Hub):
        raise UserError(f"{uri} is read-only. Write to a local folder, or to s3://, gs:// or az://.")
    try:
        return run_request(
            uri, lambda: store.put(path, content, mode=mode, chunk_size=_BLOCK_BYTES, max_concurrency=4), "written"
        )
    except FileNotFoundError as failure:
        raise UserError(f"{uri} cannot be written: the bucket {bucket} does not exist. Check the address.") from failure


def remove(uri: str) -> None:
    """Remove a file if it exists."""
    store, _, path = locate(uri)
    with suppress(FileNotFoundError):
        run_request(uri, lambda: store.delete(path), "written")


def open_file(uri: str, version: str = "") -> BinaryIO:
    """Open a local file, or one in object storage, for reading. Raises ``FileNotFoundError`` if it is missing.

    All reads from object storage use one ``version`` (:attr:`FileInfo.version`), by default the newest. They raise
    ``UserError`` if another version replaces it.
    """
    if not is_remote(uri):
        return open(uri, "rb")  # noqa: PTH123 Path would be slow for thousands of names.
    return io.BufferedReader(_RemoteFile(uri, version), buffer_size=_BLOCK_BYTES)


class _RemoteFile(io.RawIOBase):
    """Seekable file in object storage; only the requested parts are transferred."""

    def __init__(self, uri: str, version: str) -> None:
        self._uri = uri
        self._store, _, self._path = locate(uri)
        meta = _read_metadata(uri)
        self._size = meta["size"]
        self._tag = meta["e_tag"]
        self._position = 0
        if version and self._tag and version != _entity_tag(meta):
            raise self._changed_error()

    def _changed_error(self) -> UserError:
        return UserError(
            f"{self._uri} has changed since it was listed. Run the same command again to use the new version."
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        begin, end = self._position, min(self._position + len(buffer), self._size)
        if begin >= end:
            return 0
        options = {"range": (begin, end), **({"if_match": self._tag} if self._tag else {})}
        try:
            data = run_request(self._uri, lambda: memoryview(self._store.get(self._path, options=options).bytes()))
        except PreconditionError as failure:
            raise self._changed_error() from failure
        if len(data) != end - begin:  # A storage without tags now has a shorter file.
            raise self._changed_error()
        buffer[: end - begin] = data
        self._position = end
        return end - begin

    def readall(self) -> bytes:
        """Read the rest of the file in large parts; Python's own method would make a request for every 8 KiB."""
        return b"".join(iter(lambda: self.read(_BLOCK_BYTES), b""))
