"""Local folders in which a process works on directories, which may be in object storage."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from infra.storage.directory import StorageDir
from infra.storage.files import lock, scratch


@dataclass(frozen=True)
class Workspace:
    """Local folder for the files of a directory: the directory itself, or a private copy of object storage.

    Changes of a copy are in object storage only after :meth:`push`. Without a copy, methods that transfer files do
    nothing.
    """

    path: Path
    copy_of: StorageDir | None = None
    """Directory in object storage of which ``path`` is a private copy; None if ``path`` is the directory itself."""

    @classmethod
    def of(cls, location: StorageDir | Path | str, *scratch_path: str) -> Self:
        """Return the workspace of ``location`` without reading files.

        A copy is at ``scratch_path`` in the scratch folder. The default path is for the command that writes to
        ``location``; other processes of the same machine need separate copies.
        """
        directory = StorageDir.of(location)
        if directory.local_path:
            return cls(directory.local_path)
        return cls(scratch(*(scratch_path or ("copies", directory.digest, directory.name))), directory)

    @property
    def location(self) -> StorageDir:
        """The directory whose files the workspace has."""
        return self.copy_of or StorageDir.of(self.path)

    def exclusive_use(self, message: str) -> AbstractContextManager[None]:
        """Hold the directory as :meth:`StorageDir.exclusive_use` does."""
        return self.location.exclusive_use(message)

    @contextmanager
    def lock_copy(self, message: str, timeout: float) -> Iterator[None]:
        """Lock a copy that several processes fill, so that one of them downloads at a time.

        Raises ``UserError`` with ``message`` if another process still has the lock after ``timeout`` seconds.
        """
        if not self.copy_of:
            yield
            return
        with lock(self.path / ".lock", message, timeout=timeout):
            yield

    def refresh(self, include: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the copy by the files of the directory whose names ``include`` accepts.

        Files of an earlier command are removed, because another machine may have continued its work.
        """
        if not self.copy_of:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        for name in self.copy_of.list_files():
            if include(name):
                self.copy_of.download(name, self.path / name)

    def has_file_of(self, file: Path) -> bool:
        """Return whether another process's new ``file`` in its workspace exists in this one; always true for copies."""
        return self.copy_of is not None or file.exists()

    def is_missing(self, name: str, size: int) -> bool:
        """Return whether a file of ``size`` bytes has not been downloaded to the copy yet."""
        file = self.path / name
        return bool(self.copy_of) and not (file.is_file() and file.stat().st_size == size)

    def pull(self, name: str, checksum: str | None = None) -> None:
        """Download a file to the copy. Raises as :meth:`StorageDir.download` does."""
        if self.copy_of:
            self.copy_of.download(name, self.path / name, checksum)

    def push(self, *files: Path) -> None:
        """Upload ``files`` of the copy in this order; missing files are skipped."""
        if self.copy_of:
            for file in files:
                if file.is_file():
                    self.copy_of.upload(file, file.relative_to(self.path).as_posix())

    def discard_copy(self) -> None:
        """Remove the copy; pushed files remain in object storage."""
        if self.copy_of:
            shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all files, both in the copy and in the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.copy_of:
            self.copy_of.remove(self.copy_of.list_files())
