"""A reference to a run in MLflow, which a command saves for the command that resumes its work.

This module does not import MLflow, whose import would delay ``--help`` and error messages by two seconds.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from infra.errors import UserError
from infra.schema import strict, to_json
from infra.storage.directory import StorageDir

SQLITE_PREFIX = "sqlite:///"


def sqlite_store(file: Path) -> str:
    """Return the URI of the SQLite store in ``file``, as SQLAlchemy reads it."""
    return f"{SQLITE_PREFIX}{str(file).replace('%', '%25').replace('?', '%3F')}"


def sqlite_file(store: str) -> Path | None:
    """Return the file of a SQLite store; None for other stores."""
    if not store.startswith(SQLITE_PREFIX):
        return None
    return Path(unquote(store.removeprefix(SQLITE_PREFIX).partition("?")[0]))


@strict
@dataclass(frozen=True)
class RunRef:
    """Reference to an existing MLflow run, with the values that writing to it needs."""

    store: str
    experiment_id: str
    run_id: str
    run_dir: str = ""
    """Address of the run folder, which has all entries of the run, and which the run's command locks."""

    def to_json_for(self, run_dir: str) -> dict[str, str]:
        """Return the reference as JSON values for a file in the folder with the address ``run_dir``."""
        return to_json(replace(self, run_dir=run_dir))

    @property
    def is_reachable(self) -> bool:
        """Whether the run's store can be used on this machine; a SQLite store must exist on its disk."""
        file = sqlite_file(self.store)
        return file is None or file.exists()

    def check_belongs_to(self, directory: StorageDir, advice: str) -> "RunRef":
        """Check that the reference was saved in ``directory``, from which it was read, and return it.

        Raises ``UserError`` if the folder was copied or moved, because two folders must not continue one run, or if the
        store is not on this machine. The message ends with ``advice``, a sentence without its period.
        """
        if self.run_dir != directory.address:
            raise UserError(
                f"{directory} was copied or moved from {self.run_dir}, which owns its MLflow run. {advice}."
            )
        if not self.is_reachable:
            raise UserError(
                f"The MLflow store {self.store} of {directory} is not on this machine. Restore it. {advice}."
            )
        return self
