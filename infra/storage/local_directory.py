"""A directory on a disk of this machine, or on a disk that several machines share."""

import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Self

from infra.errors import UserError
from infra.storage.directory import BLOCK_BYTES, StorageDir
from infra.storage.files import TEMPORARY_PREFIX, atomic_file, clear_temporaries, sync_folder


class LocalDir(StorageDir, schemes=("",)):
    """Directory on a local or shared disk, by its absolute path."""

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        return cls(str(Path(text, name).resolve()))

    @property
    def local_path(self) -> Path:
        return Path(self.address)

    @property
    def name(self) -> str:
        return self.local_path.name

    @property
    def parent(self) -> "LocalDir":
        return LocalDir(str(self.local_path.parent))

    def __truediv__(self, name: str) -> "LocalDir":
        return LocalDir(str(self.local_path / name))

    def check_writable(self, flag: str) -> None:
        """Raise a ``UserError`` that names ``flag`` if this machine cannot write to the folder.

        Writes and removes a small file, in the nearest existing parent if the folder does not exist.
        """
        folder = self.local_path
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        probe = folder / f"{TEMPORARY_PREFIX}probe-{os.getpid()}"
        try:
            probe.write_bytes(b"probe")
            probe.unlink()
        except OSError as failure:
            raise UserError(f"Cannot write to {flag} {self}: {failure.strerror}. Choose another location.") from failure

    @contextmanager
    def create(self, message: str) -> Iterator[None]:
        try:
            self.local_path.mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"{self} already exists. Use another --name.") from None
        except OSError as failure:
            raise UserError(f"Cannot create {self}: {failure.strerror}. Choose another --out.") from failure
        with self.exclusive_use(message):
            yield

    @property
    def lock_path(self) -> Path:
        return self.local_path / self.LOCK_FILE

    def lock_orphaned(self) -> AbstractContextManager[None]:
        if self.lock_path.exists():
            return self.lock(f"A command is running in {self}.")
        if self.local_path.parent.is_dir():  # The disk is present, so the folder was removed.
            return nullcontext()
        raise UserError(f"{self} may be in use.")

    def exclusive_use(self, message: str) -> AbstractContextManager[None]:
        return self.lock(message)

    def exists(self, name: str) -> bool:
        return (self.local_path / name).is_file()

    def entries(self) -> set[str] | None:
        if not self.local_path.exists():
            return None
        return {path.name for path in self.local_path.iterdir()} if self.local_path.is_dir() else {""}

    def list_files(self, *folders: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for folder in folders or ("",):
            for parent, _, names in os.walk(self.local_path / folder):
                for path in (Path(parent) / name for name in names):
                    with suppress(OSError):  # A temporary file may be removed meanwhile, and a link may be broken.
                        sizes[path.relative_to(self.local_path).as_posix()] = path.stat().st_size
        return sizes

    def open(self, name: str) -> BinaryIO:
        return (self.local_path / name).open("rb")

    def read(self, name: str) -> bytes:
        return (self.local_path / name).read_bytes()

    def map(self, name: str) -> mmap.mmap:
        with self.open(name) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def write(self, name: str, content: bytes | memoryview) -> None:
        (self.local_path / name).parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.local_path / name) as file:
            file.write(content)

    def upload(self, file: Path, name: str) -> None:
        if file == self.local_path / name:
            return
        (self.local_path / name).parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as source, atomic_file(self.local_path / name) as sink:
            shutil.copyfileobj(source, sink, BLOCK_BYTES)

    def remove(self, names: Iterable[str]) -> None:
        paths = [path for name in names if (path := self.local_path / name).exists()]
        for path in paths:
            path.unlink(missing_ok=True)
        for parent in dict.fromkeys(path.parent for path in paths):
            sync_folder(parent)

    def remove_on_own_disk(self, names: Iterable[str]) -> None:
        self.remove(names)

    def remove_temporaries(self, *folders: str) -> None:
        for folder in folders:
            clear_temporaries(self.local_path / folder)

    def remove_empty(self, *folders: str) -> None:
        for folder in folders:
            with suppress(OSError):  # The folder does not exist, or contains files.
                (self.local_path / folder).rmdir()
