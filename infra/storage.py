"""Files on disk and in object storage: written whole or not at all, locked, and read with retries.

A reader never sees half a file: data goes to a temporary name in the same folder, is fsynced, and is
renamed to the final name.
"""

import atexit
import gc
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow.fs as fs
from filelock import FileLock, Timeout

from infra.credentials import has_secret
from infra.errors import UserError, first_line

TEMPORARY = ".partial-"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a private temporary file that becomes ``path``, durably, when the block ends without an error.

    It is always a new one: a link of its name, which another user may have made in a folder that both can write, is
    removed and not followed. Raises ``UserError`` when it cannot be written: a full disk, a quota, a read-only folder.
    """
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as refused:
        raise _refusal(path, refused) from refused
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as failure:
        temporary.unlink(missing_ok=True)
        if isinstance(failure, OSError) and failure.errno is not None:
            raise _refusal(path, failure) from failure
        raise


def _refusal(path: Path, refused: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written ({refused.strerror}): make room or fix the folder, then run the same command again."
    )


@contextmanager
def lock(path: Path, refusal: str, *, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock file ``path``; the system releases it however the process ends.

    Waits ``patience`` seconds for another process that holds it, then raises ``UserError`` with ``refusal``. Raises
    ``OSError`` when its folder does not exist, which the library would create.
    """
    os.scandir(path.parent).close()
    # No soft lock on file systems without flock: it would outlive a process that is killed.
    file_lock = FileLock(path, timeout=patience, thread_local=False, fallback_to_soft=False)
    try:
        file_lock.acquire()
    except Timeout:
        raise UserError(refusal) from None
    try:
        yield
    finally:
        file_lock.release()


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def json_text(value: Any) -> str:
    """``value`` as indented JSON with sorted keys, so that equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as :func:`json_text`, atomically."""
    write_text(path, json_text(value))


def clear_temporaries(folder: Path) -> None:
    """Remove temporary files that killed writers left in ``folder`` (only while no writer is alive)."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        leftover.unlink(missing_ok=True)


T = TypeVar("T")

REMOTE = ("s3", "gs", "gcs", "hf")

ATTEMPTS = 5

FIRST_PAUSE = 0.2
"""Seconds before the second attempt; the pause doubles with each further one."""

GOOGLE_PATIENCE = 10
"""Seconds for which Google's client retries one request; by default it is silent for a quarter of an hour."""

_LASTING = re.compile("NO_SUCH_BUCKET|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH")
"""S3's errors that do not go away by themselves, as Arrow names them."""

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
    try:
        if scheme == "hf":
            from huggingface_hub import HfFileSystem  # an extra: pip install 'throughline[hf]'

            return fs.PyFileSystem(fs.FSSpecHandler(HfFileSystem()))
        return fs.FileSystem.from_uri(uri)[0]
    except ImportError as missing:
        raise UserError(f"{uri} needs the package huggingface_hub: 'pip install huggingface_hub'.") from missing
    except (OSError, ValueError) as wrong:
        raise UserError(f"{uri} cannot be opened: {first_line(wrong)}") from wrong


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
        found = with_retries(uri, lambda: system.get_file_info(fs.FileSelector(path, recursive=True)))
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

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.size()}[whence]
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(0, self.file.size() - self.position))
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


def with_retries(uri: str, action: Callable[[], T], doing: str = "read") -> T:
    """The result of ``action()``, which is tried ``ATTEMPTS`` times unless the storage refuses it.

    Raises ``FileNotFoundError`` at once and ``UserError`` after the last attempt, which ``doing`` describes.
    """
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except FileNotFoundError:
            raise
        except _failures(uri) as failure:
            if _LASTING.search(str(failure)):
                raise UserError(
                    f"{uri} cannot be {doing} ({reason(failure)}): check the address and your credentials."
                ) from failure
            if attempt == ATTEMPTS:
                raise UserError(
                    f"{uri} cannot be {doing}, after {ATTEMPTS} attempts: {reason(failure)}. Run the same command "
                    "again to continue from here."
                ) from failure
            time.sleep(pause)
            pause *= 2
    raise AssertionError("the last attempt returns or raises")


def reason(failure: BaseException) -> str:
    """What the storage said, without the names of requests that Arrow's S3 client puts around it."""
    said = re.search(r"AWS Error .*? during \w+ operation: (.+?)(?: \(Request ID|$)", first_line(failure))
    return (said[1] if said else first_line(failure)).rstrip(".")


def _failures(uri: str) -> tuple[type[Exception], ...]:
    """The exceptions of failing storage at ``uri``; the Hugging Face hub's filesystem also raises its client's own."""
    if urlsplit(uri).scheme != "hf":
        return (OSError,)
    from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage] that of its HTTP client

    return (OSError, HTTPError)
