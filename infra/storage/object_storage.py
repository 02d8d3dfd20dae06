"""Files in object storage (S3, Google Cloud Storage, Azure, the Hugging Face hub), by their URIs.

In: ``s3://bucket/path``, ``gs://...``, ``az://container/path`` or, only to be read, ``hf://datasets/...``; what follows
a ``?`` are settings of obstore, such as ``?endpoint=http://127.0.0.1:9000&region=us-east-1``. Out: requests that
obstore repeats while they fail, and that end: with an answer, with ``FileNotFoundError``, or with a sentence.
"""

import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
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

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "hf")

REQUEST_SECONDS = 60.0
"""How long one request may take with its answer: 8 MiB, four at a time, take half of it at 1 MB/s."""

RETRY_TIMEOUT_SECONDS = 240.0
"""For how long a request that fails is repeated. A partition of the network may last a minute."""

WARN_AFTER_SECONDS = 10.0
"""After how long the user is told what is being waited for."""

_BLOCK = 8 << 20
"""Bytes of a request for a part of a file."""

_told = [float("-inf")]
"""When the user was last told that storage does not answer: once for many requests at a time."""


@dataclass(frozen=True)
class FileInfo:
    """A file in a listing. ``path`` begins with its bucket; ``modified`` is in nanoseconds; ``version`` is its tag."""

    path: str
    size: int
    modified: int
    version: str


def is_remote(uri: str) -> bool:
    """Whether ``uri`` names something that is not on this machine."""
    return urlsplit(uri).scheme in SCHEMES and "://" in uri


def locate(uri: str) -> tuple[Any, str, str]:
    """The store of a remote ``uri``, its bucket, and the path in that. Percent-encoding is decoded.

    Raises ``UserError`` for a URI that is malformed or contains a secret key, which the manifest and MLflow would keep.
    """
    parts = urlsplit(uri)
    user, _, bucket = parts.netloc.rpartition("@")
    if not bucket:
        raise UserError(f"{uri} names no bucket: write for example {parts.scheme}://bucket/folder.")
    if has_secret(uri):
        raise UserError(
            f"The address of the bucket {bucket} contains a secret key, which results would store. Remove it, and set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the environment variables of your storage."
        )
    query = parts.query + ("&skip_signature=true" if user == "anonymous" else "")
    return _store(f"{parts.scheme}://{bucket}", query), bucket, unquote(parts.path).strip("/")


@cache
def _store(bucket: str, query: str) -> Any:
    """One store per bucket, so that connections are reused."""
    if bucket.startswith("hf://"):
        return _Hub(bucket.removeprefix("hf://"))
    settings: dict[str, Any] = dict(parse_qsl(query))
    try:
        if bucket.startswith("s3://") and "skip_signature" not in settings:
            settings |= _credentials()
        return from_url(
            bucket,
            # An endpoint that begins with http:// was asked for.
            client_options={"allow_http": True, "timeout": timedelta(seconds=REQUEST_SECONDS)},
            retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_SECONDS)},
            **settings,
        )
    except (BaseError, ValueError) as wrong:
        raise UserError(f"{bucket}?{query} cannot be opened: {first_line(wrong).rstrip('.')}.") from wrong


def _credentials() -> dict[str, Any]:
    """Those of a profile of ``~/.aws``, which only boto3 reads, where the environment has none.

    Raises ``ValueError`` when the profile does not exist.
    """
    if any(map(os.environ.get, ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"))) or not find_spec("boto3"):
        return {}
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return {"credential_provider": Boto3CredentialProvider()}
    except ValueError:  # there are none; a machine may have a role
        return {}
    except BotoCoreError as wrong:
        raise ValueError(str(wrong)) from wrong


class _Hub:
    """The Hugging Face hub, as much like a store of obstore as reading needs."""

    def __init__(self, bucket: str) -> None:
        try:
            from huggingface_hub import HfFileSystem  # an extra: pip install 'throughline[hf]'
        except ImportError as missing:
            raise UserError("hf:// needs the package huggingface_hub: 'pip install huggingface_hub'.") from missing
        self._system, self._bucket = HfFileSystem(), bucket

        self._commits: dict[str, str | None] = {}

    def _commit(self, path: str) -> str | None:
        """The newest commit of the repository of ``path`` when this process first read it, which has no request for
        one version of a file; None where the path names a revision, or the repository has no commits."""
        repository = "/".join(path.split("/")[:2])
        if repository not in self._commits:
            from huggingface_hub import HfApi

            resolved = self._system.resolve_path(f"{self._bucket}/{path}")
            name, kind = (getattr(resolved, attribute, None) for attribute in ("repo_id", "repo_type"))
            self._commits[repository] = (
                HfApi().repo_info(name, repo_type=kind).sha if name and "@" not in path else None
            )
        return self._commits[repository]

    def head(self, path: str) -> dict[str, Any]:
        info = self._system.info(f"{self._bucket}/{path}", revision=self._commit(path))
        if info["type"] != "file":
            raise FileNotFoundError(path)
        return self._meta(path, info)

    def list(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        entries: Any = self._system.find(f"{self._bucket}/{prefix}", detail=True)
        yield [self._meta(name.removeprefix(f"{self._bucket}/"), info) for name, info in entries.items()]

    @staticmethod
    def _meta(path: str, info: dict[str, Any]) -> dict[str, Any]:
        return {"path": path, "size": info["size"], "last_modified": None, "e_tag": info.get("blob_id")}

    def get(self, path: str, *, options: Any) -> "_HubRange":
        """A range of the file as it was when this process first read of its repository."""
        start, end = options["range"]
        whole = f"{self._bucket}/{path}"
        content: Any = self._system.cat_file(whole, start=start, end=end, revision=self._commit(path))
        return _HubRange(content)


@dataclass(frozen=True)
class _HubRange:
    """What :meth:`_Hub.get` returns, in the place of obstore's ``GetResult``."""

    content: bytes

    def bytes(self) -> bytes:
        return self.content


def run_request(uri: str, action: Callable[[], T], action_name: str = "read") -> T:
    """The result of ``action()``, which makes requests; meanwhile Ctrl-C interrupts, as obstore's calls do not.

    Raises ``FileNotFoundError``, obstore's errors of conditional writes, and ``UserError``, which ``action_name``
    describes, when the storage refuses or keeps failing.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(action())
        except BaseException as failure:  # noqa: BLE001 raised where the action was asked for
            answer.set_exception(failure)

    threading.Thread(target=work, name="storage", daemon=True).start()
    if not wait([answer], WARN_AFTER_SECONDS).done:
        _warn_slow(uri)
    try:
        return answer.result()
    except (FileNotFoundError, AlreadyExistsError, PreconditionError):
        raise
    except (UnauthenticatedError, PermissionDeniedError) as refused:
        raise UserError(
            f"{uri} cannot be {action_name} ({error_reason(refused)}): check the address and your credentials."
        ) from refused
    except InvalidPathError as invalid:  # obstore neither lists nor reads a name with an empty part
        raise UserError(
            f"{uri} cannot be {action_name}, because the name of an object there has an empty part (//) or a control "
            f"character ({error_reason(invalid)}): rename or remove it, or name the folders beside it."
        ) from invalid
    except _failures(uri) as failure:
        raise UserError(
            f"{uri} cannot be {action_name}: {error_reason(failure)}. Check the address, your credentials and the "
            "network, then run the same command again to continue from here."
        ) from failure


def _warn_slow(uri: str) -> None:
    if time.monotonic() - _told[0] < RETRY_TIMEOUT_SECONDS:
        return
    _told[0] = time.monotonic()
    from infra.cli.console import errors  # a tokenizing worker has no use for a terminal otherwise

    errors.print(
        f"Still waiting for {uri} after {WARN_AFTER_SECONDS:.0f} s, and for up to "
        f"{RETRY_TIMEOUT_SECONDS + REQUEST_SECONDS:.0f} s; Ctrl-C exits.",
        markup=False,
    )


def error_reason(failure: BaseException) -> str:
    """What the storage said, without the XML around it and the request that it answers."""
    if message := re.search(r"<Message>(.*?)</Message>", str(failure), re.S):
        return message[1].rstrip(".")
    return re.sub(r"^Generic \w+ error: |, max_retries: \d+, retry_timeout: \w+", "", first_line(failure)).rstrip(".")


def _failures(uri: str) -> tuple[type[Exception], ...]:
    """The exceptions of failing storage at ``uri``; the Hugging Face hub's filesystem also raises its client's own."""
    if urlsplit(uri).scheme != "hf":
        return (BaseError, OSError)
    from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage] that of its HTTP client

    return (OSError, HTTPError)


def list_files(uri: str) -> list[FileInfo]:
    """Files at a remote ``uri``: itself, or everything below it. Raises ``UserError`` when it cannot be read."""
    store, bucket, path = locate(uri)

    def list_entries() -> list[Any]:
        if path:
            with suppress(FileNotFoundError):
                return [store.head(path)]
        every = (one for some in store.list(path) for one in some)
        return [one for one in every if one["path"] != path]  # a page of S3 makes a folder as a file of its name

    return [
        FileInfo(
            f"{bucket}/{one['path']}",
            one["size"],
            int(one["last_modified"].timestamp() * 1e9) if one["last_modified"] else 0,
            _tag(one),
        )
        for one in run_request(uri, list_entries, "listed")
    ]


def _tag(meta: Any) -> str:
    """The tag of a file's version without the quotes that Azure's listings lack; empty where there is none."""
    return (meta["e_tag"] or "").removeprefix("W/").strip('"')


def file_size(uri: str) -> int:
    """Bytes of a file. Raises ``FileNotFoundError`` when there is none."""
    return _head(uri)["size"]


def _head(uri: str) -> Any:
    store, _, path = locate(uri)
    return run_request(uri, lambda: store.head(path))


def read(uri: str) -> bytes:
    """A file's content. Raises ``FileNotFoundError`` when there is none."""
    return open_file(uri).read() if isinstance(locate(uri)[0], _Hub) else read_version(uri)[0]


def read_version(uri: str) -> tuple[bytes, dict[str, Any]]:
    """A file's content, and the version that a conditional write replaces. Raises ``FileNotFoundError``."""
    store, _, path = locate(uri)

    def get() -> tuple[bytes, dict[str, Any]]:
        response = store.get(path)
        return response.bytes().to_bytes(), {"e_tag": response.meta["e_tag"], "version": response.meta["version"]}

    return run_request(uri, get)


def write(uri: str, content: bytes | memoryview | Path, mode: Any = "overwrite") -> dict[str, Any]:
    """Replace a file by ``content``, that of a local file where it is a path; returns its new version.

    ``mode`` is obstore's: with ``create`` it must not exist, with a version it must be that one.
    """
    store, bucket, path = locate(uri)
    if isinstance(mode, dict):
        mode = {name: value for name, value in mode.items() if value}  # S3 has no version beside its tag
    if isinstance(store, _Hub):
        raise UserError(f"{uri} can only be read: name a folder here, or at s3://, gs:// or az://.")
    try:
        return run_request(
            uri, lambda: store.put(path, content, mode=mode, chunk_size=_BLOCK, max_concurrency=4), "written"
        )
    except FileNotFoundError as missing:
        raise UserError(f"{uri} cannot be written (there is no bucket {bucket}): check the address.") from missing


def remove(uri: str) -> None:
    """Remove a file; one that does not exist is no error."""
    store, _, path = locate(uri)
    with suppress(FileNotFoundError):
        run_request(uri, lambda: store.delete(path), "written")


def open_file(uri: str, version: str = "") -> BinaryIO:
    """A seekable binary file. Raises ``FileNotFoundError`` when it does not exist.

    All that is read of a remote file is of one version: that of ``Entry.version``, if it is given, else the newest.
    Raises ``UserError``, also while it is read, when there is another one.
    """
    if not is_remote(uri):
        return open(uri, "rb")  # noqa: PTH123 the caller closes it; Path would parse each name
    return io.BufferedReader(_RemoteFile(uri, version), buffer_size=_BLOCK)


class _RemoteFile(io.RawIOBase):
    """A remote file, of which parts are read as they are asked for."""

    def __init__(self, uri: str, version: str) -> None:
        self._uri = uri
        self._store, _, self._path = locate(uri)
        meta = _head(uri)
        self._size = meta["size"]
        self._tag = meta["e_tag"]
        self._position = 0
        if version and self._tag and version != _tag(meta):
            raise self._other_version()

    def _other_version(self) -> UserError:
        return UserError(f"{self._uri} has changed since it was listed. Run the same command again to read it anew.")

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
        except PreconditionError as replaced:
            raise self._other_version() from replaced
        if len(data) != end - begin:  # a store without tags has a shorter one now
            raise self._other_version()
        buffer[: end - begin] = data
        self._position = end
        return end - begin

    def readall(self) -> bytes:
        """The rest of the file. Python's own would make a request for every 8 KiB."""
        return b"".join(iter(lambda: self.read(_BLOCK), b""))
