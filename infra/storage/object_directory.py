"""A directory in object storage, which consists of the files whose names begin with its path."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import quote, unquote

from infra.errors import UserError
from infra.storage import object_storage
from infra.storage.directory import CONCURRENT_REQUESTS, StorageDir
from infra.storage.files import TEMPORARY_PREFIX, scratch
from infra.storage.lease import DEFAULT_TIMING, LEASE_FILE, LeaseTiming, hold_lease
from infra.storage.object_storage import SCHEMES, error_reason


class ObjectDir(StorageDir, schemes=SCHEMES):
    """Directory in a bucket, by its URI; the query of the URI may set an endpoint."""

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        path, mark, query = text.partition("?")
        return cls("/".join([path.rstrip("/"), *([quote(name)] if name else [])]) + mark + query)

    @property
    def _path(self) -> str:
        """The URI without its query."""
        return self.address.partition("?")[0]

    def _with_path(self, path: str) -> "ObjectDir":
        return ObjectDir(path + self.address.removeprefix(self._path))

    def _uri(self, name: str) -> str:
        return str(self / name)

    @property
    def local_path(self) -> None:
        return None

    @property
    def name(self) -> str:
        return unquote(self._path.rpartition("/")[2])

    @property
    def parent(self) -> "ObjectDir":
        return self._with_path(self._path.rpartition("/")[0])

    def __truediv__(self, name: str) -> "ObjectDir":
        return self._with_path(f"{self._path}/{quote(name)}")

    def check_writable(self, flag: str) -> None:
        """Raise a ``UserError`` that names ``flag`` if this machine cannot write to the directory.

        Writes and removes a small file.
        """
        probe = f"{TEMPORARY_PREFIX}probe-{os.getpid()}"
        try:
            self.write(probe, b"probe")
            self.remove([probe])
        except UserError as failure:
            reason = error_reason(failure.__cause__ or failure)
            raise UserError(f"Cannot write to {flag} {self}: {reason}. Choose another location.") from failure

    @contextmanager
    def create(self, message: str) -> Iterator[None]:
        with self.exclusive_use(message):
            if self.entries():
                raise UserError(f"{self} already exists. Use another --name.")
            yield

    @property
    def lock_path(self) -> Path:
        """Lock file in the scratch folder; object storage cannot release a lock when a process ends."""
        return scratch("locks") / self.digest

    def lock_orphaned(self) -> AbstractContextManager[None]:
        if not self.lock_path.exists():
            raise UserError(f"{self} may be in use.")
        return self.lock(f"A command is running in {self}.")

    @contextmanager
    def exclusive_use(self, message: str, timing: LeaseTiming = DEFAULT_TIMING) -> Iterator[None]:
        with self.lock(message), hold_lease(self, timing):
            yield

    def exists(self, name: str) -> bool:
        try:
            return object_storage.file_size(self._uri(name)) >= 0
        except FileNotFoundError:
            return False

    def entries(self) -> set[str] | None:
        return {name.partition("/")[0] for name in self.list_files()} or None

    def list_files(self, *folders: str) -> dict[str, int]:
        """Return the size in bytes of every file by name, except leases."""
        _, bucket, path = object_storage.locate(self.address)
        prefix = f"{bucket}/{path}".rstrip("/") + "/"
        directories = [self / folder for folder in folders] or [self]
        files = [file for directory in directories for file in object_storage.list_files(directory.address)]
        sizes = {file.path.removeprefix(prefix): file.size for file in files}
        return {name: size for name, size in sizes.items() if LEASE_FILE not in name.split("/")}

    def open(self, name: str) -> BinaryIO:
        return object_storage.open_file(self._uri(name))

    def read(self, name: str) -> bytes:
        return object_storage.read(self._uri(name))

    def map(self, name: str) -> bytes:
        return self.read(name)

    def write(self, name: str, content: bytes | memoryview) -> None:
        object_storage.write(self._uri(name), memoryview(content).cast("B"))

    def upload(self, file: Path, name: str) -> None:
        object_storage.write(self._uri(name), file)

    def remove(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            list(pool.map(lambda name: object_storage.remove(self._uri(name)), names))

    def remove_on_own_disk(self, names: Iterable[str]) -> None:
        """Do nothing, because the driver removes the files.

        A machine that lost its connection must not remove files of the machine that took over its work.
        """

    def remove_temporaries(self, *folders: str) -> None:
        """Do nothing, because object storage only has complete files."""

    def remove_empty(self, *folders: str) -> None:
        """Do nothing, because object storage has no folders."""
