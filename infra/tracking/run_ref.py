"""The key to a run in MLflow, which a command saves for the one that continues its work.

Separate from ``infra.tracking.tracker``, because importing MLflow takes two seconds that ``--help`` and error messages
need not wait for.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote

from infra.errors import UserError
from infra.schema import strict, to_json
from infra.storage.directory import StorageDir

SQLITE = "sqlite:///"


def sqlite_store(file: Path) -> str:
    """The address of the SQLite store in ``file``, as SQLAlchemy reads it."""
    return f"{SQLITE}{str(file).replace('%', '%25').replace('?', '%3F')}"


def sqlite_file(store: str) -> Path | None:
    """The file of a SQLite store; None for another store."""
    return Path(unquote(store.removeprefix(SQLITE).partition("?")[0])) if store.startswith(SQLITE) else None


@strict
@dataclass(frozen=True)
class RunRef:
    """All that is needed to write to an existing run."""

    store: str
    experiment_id: str
    run_id: str
    run_dir: str = ""
    """The folder that has what the run records, and that its command holds: an absolute path or an address."""

    def to_json_for(self, run_dir: str) -> dict[str, str]:
        """The key as JSON values for a file in ``run_dir``, an absolute path or an address."""
        return to_json(replace(self, run_dir=run_dir))

    @property
    def is_reachable(self) -> bool:
        """Whether its store can be asked from this machine: it is not a file that is missing here."""
        file = sqlite_file(self.store)
        return file is None or file.exists()

    def check_belongs_to(self, directory: StorageDir, instead: str) -> "RunRef":
        """This reference, which was read in ``directory``.

        Raises ``UserError`` if that is not the folder it was saved in, because two folders must not continue one run,
        and if its store is not on this machine. The message ends with ``instead``, a sentence without its period.
        """
        if self.run_dir != directory.address:
            raise UserError(
                f"{directory} was copied or moved from {self.run_dir}, to which its MLflow run belongs. {instead}."
            )
        if not self.is_reachable:
            raise UserError(
                f"The MLflow store {self.store} of {directory} is not on this machine. Restore it. {instead}."
            )
        return self
