"""The local folder in which a process works on a directory, wherever that is."""

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
    """The local folder for the files of ``location``: that folder itself, or a private copy of object storage.

    What is written to a copy is in its location only after :meth:`push`. Where there is no copy, methods that transfer
    files do nothing.
    """

    path: Path
    copy_of: StorageDir | None = None
    """The directory of which ``path`` is a private copy; None if ``path`` is the location itself."""

    @classmethod
    def of(cls, location: StorageDir | Path | str, *scratch_path: str) -> Self:
        """The workspace of ``location``, without reading anything.

        A copy is at ``scratch_path`` in the scratch folder. By default it is that of the command that writes to
        ``location``; other processes of the same machine need copies of their own.
        """
        directory = StorageDir.of(location)
        if directory.local_path:
            return cls(directory.local_path)
        return cls(scratch(*(scratch_path or ("copies", directory.digest, directory.name))), directory)

    @property
    def location(self) -> StorageDir:
        """The directory that this is the workspace of."""
        return self.copy_of or StorageDir.of(self.path)

    def exclusive_use(self, message: str) -> AbstractContextManager[None]:
        """Hold the location as :meth:`StorageDir.exclusive_use` does."""
        return self.location.exclusive_use(message)

    @contextmanager
    def lock_copy(self, message: str, timeout: float) -> Iterator[None]:
        """Lock a copy that several processes fill, waiting up to ``timeout`` seconds for another one.

        Raises ``UserError`` with ``message`` after that.
        """
        if not self.copy_of:
            yield
            return
        with lock(self.path / ".lock", message, timeout=timeout):
            yield

    def refresh(self, include: Callable[[str], bool] = lambda name: True) -> None:
        """Make the copy anew from the files of the location whose names ``include`` accepts.

        What an earlier command left is removed, because another machine may have continued its work.
        """
        if not self.copy_of:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        for name in self.copy_of.list_files():
            if include(name):
                self.copy_of.download(name, self.path / name)

    def sees(self, file: Path) -> bool:
        """Whether a ``file`` that another process made in its workspace is visible here, unless that is a copy."""
        return self.copy_of is not None or file.exists()

    def is_missing(self, name: str, size: int) -> bool:
        """Whether a file of ``size`` bytes is still to be downloaded to the copy."""
        file = self.path / name
        return bool(self.copy_of) and not (file.is_file() and file.stat().st_size == size)

    def pull(self, name: str, checksum: str | None = None) -> None:
        """Download a file to the copy. Raises as :meth:`StorageDir.download` does."""
        if self.copy_of:
            self.copy_of.download(name, self.path / name, checksum)

    def push(self, *files: Path) -> None:
        """Upload these files of ``path``, in this order; missing ones are skipped."""
        if self.copy_of:
            for file in files:
                if file.is_file():
                    self.copy_of.upload(file, file.relative_to(self.path).as_posix())

    def discard_copy(self) -> None:
        """Remove the copy; its location keeps what was pushed."""
        if self.copy_of:
            shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all files, here and in the location."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self.copy_of:
            self.copy_of.remove(self.copy_of.list_files())
