"""Files in object storage (S3, Google Cloud Storage, the Hugging Face hub), by their URIs: listed, read and written.

In: ``s3://bucket/path``, ``gs://...`` or ``hf://datasets/...``. Out: Arrow's filesystems, and files whose reads are
retried.
"""

import atexit
import gc
import io
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import pyarrow.fs as fs

from infra.credentials import has_secret
from infra.errors import UserError, first_line
from infra.retries import with_retries

REMOTE = ("s3", "gs", "gcs", "hf")

GOOGLE_PATIENCE = 10
"""Seconds for which Google's client retries one request; by default it is silent for a quarter of an hour."""

LISTING_SECONDS = 3600.0
"""How long the files below a folder may take to list: a request for each thousand of them."""

_BUFFER = 4 << 20

_BLOCK = 8 << 20

_WHOLE = 64 << 20
"""Most bytes of a request for the rest of a file."""


@dataclass(frozen=True)
class Entry:
    """A file in a listing. ``path`` is its path within the filesystem."""

    path: str
    size: int
    modified: int


def is_remote(uri: str) -> bool:
    """Whether ``uri`` names something that is not on this machine."""
    return urlsplit(uri).scheme in REMOTE and "://" in uri


def locate(uri: str) -> tuple[Any, str]:
    """The filesystem of a remote ``uri`` and the path in it, beginning with the bucket. Percent-encoding is decoded.

    Raises ``UserError`` for a URI that is malformed or contains a secret key, which the manifest and MLflow would keep.
    """
    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    if not bucket:
        raise UserError(f"{uri} names no bucket: write for example {parts.scheme}://bucket/folder.")
    if has_secret(uri):
        raise UserError(
            f"the address of the bucket {bucket} contains a secret key, which would be kept with the results: remove "
            "it and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the environment variables of your storage."
        )
    return _filesystem(parts.scheme, parts.netloc, parts.query), unquote(f"{bucket}{parts.path}").rstrip("/")


@cache
def _filesystem(scheme: str, bucket: str, query: str) -> Any:
    """One filesystem per bucket, so that connections are reused. ``query`` may name an endpoint, for example.

    Raises ``UserError`` when the scheme needs a package that is missing or the URI is malformed.
    """
    uri = f"{scheme}://{bucket}" + (f"?{query}" if query else "")
    if scheme in ("gs", "gcs") and "retry_limit_seconds" not in query:
        uri += f"{'&' if query else '?'}retry_limit_seconds={GOOGLE_PATIENCE}"
    if scheme == "s3":  # one request for a small file instead of three
        uri += f"{'&' if query else '?'}allow_delayed_open=true"

    def connect() -> Any:
        try:
            if scheme == "hf":
                from huggingface_hub import HfFileSystem  # an extra: pip install 'throughline[hf]'

                return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))
            return fs.FileSystem.from_uri(uri)[0]
        except ImportError as missing:
            raise UserError(f"{uri} needs the package huggingface_hub: 'pip install huggingface_hub'.") from missing
        except (OSError, ValueError) as wrong:
            raise UserError(f"{uri} cannot be opened: {first_line(wrong)}") from wrong

    return with_retries(uri, connect, "opened")  # S3 is asked for the bucket's region


@atexit.register  # runs before Arrow's own, which was registered when Arrow was imported
def _release() -> None:
    """Drop every filesystem, also those in the frames of an exception that nobody caught.

    Arrow shuts its S3 client down when Python exits, and waits for ever for credentials that a filesystem still holds:
    from version 24 on with a web identity, as Kubernetes gives it (https://github.com/apache/arrow/issues/50188).
    """
    if _filesystem.cache_info().currsize:
        _filesystem.cache_clear()
        for name in ("last_exc", "last_value", "last_traceback"):
            setattr(sys, name, None)
        gc.collect()


def listing(uri: str) -> Iterator[Entry]:
    """Files at a remote ``uri``: itself, or everything below it. Raises ``UserError`` when it cannot be read."""
    system, path = locate(uri)
    info = with_retries(uri, lambda: system.get_file_info(path))
    found = [info]
    if info.type == fs.FileType.Directory:
        found = with_retries(
            uri, lambda: system.get_file_info(fs.FileSelector(path, recursive=True)), "listed", seconds=LISTING_SECONDS
        )
    for one in found:
        if one.type == fs.FileType.File:
            yield Entry(one.path, one.size, one.mtime_ns or 0)


def open_file(uri: str) -> BinaryIO:
    """A seekable binary file. Raises ``FileNotFoundError`` when it does not exist."""
    if not is_remote(uri):
        return open(uri, "rb")  # noqa: PTH123 the caller closes it; Path would parse each name
    system, path = locate(uri)
    file = with_retries(uri, lambda: system.open_input_file(path))
    return io.BufferedReader(_RetryingFile(uri, file), buffer_size=_BUFFER)


def store(file: Path, system: Any, path: str) -> None:
    """Write a local ``file`` to ``path`` of a filesystem from :func:`locate`. Raises ``OSError`` when that fails."""
    system.create_dir(path.rpartition("/")[0])  # object storage has no folders, other filesystems do
    with file.open("rb") as source, system.open_output_stream(path) as sink:
        shutil.copyfileobj(source, sink, _BLOCK)


class _RetryingFile(io.RawIOBase):
    """A remote file whose reads are retried."""

    def __init__(self, uri: str, file: Any) -> None:
        self.uri = uri
        self.file = file
        self.position = 0
        self.size = with_retries(uri, file.size)  # the first request, which finds that there is no such file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = 0 if whence == io.SEEK_SET else self.position if whence == io.SEEK_CUR else self.size
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(0, self.size - self.position))
        data = with_retries(self.uri, lambda: self.file.read_at(size, self.position)) if size else b""
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def readall(self) -> bytes:
        """The rest of the file. Python's own would make a request for every 8 KiB."""
        return b"".join(iter(lambda: self.read(_WHOLE), b""))

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()
