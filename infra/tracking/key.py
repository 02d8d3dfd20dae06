"""The key to a run in MLflow, which a command keeps for the one that continues its work.

Apart from ``infra.tracking.tracker`` because importing MLflow takes two seconds that ``--help`` and mistakes need
not wait for.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from infra.errors import UserError
from infra.schema import strict, to_json

SQLITE = "sqlite:///"


@strict
@dataclass(frozen=True)
class RunKey:
    """All that is needed to write into a run that exists."""

    store: str
    experiment_id: str
    run_id: str
    journal: str
    """Folder for entries that could not be delivered; absolute, because work is continued from anywhere."""
    home: str = ""
    """The folder that the key is kept in, absolute; empty where it is not kept, and in keys of earlier versions."""

    def kept_in(self, folder: Path) -> dict[str, str]:
        """The key as JSON values for a file in ``folder``, which is absolute."""
        return to_json(replace(self, home=str(folder)))

    def found_in(self, folder: Path, instead: str, *, store: str | None = None) -> "RunKey":
        """The key as it holds in ``folder``, where it was read: in a project that was copied or moved, with its store.

        Raises ``UserError`` when the store did not come along, and when ``folder`` is a copy that shares its
        original's store: nothing is written into another folder's run. The sentence ends with what to do ``instead``.
        A ``store`` that the user names is taken as it is.
        """
        old, new = Path(self.home or folder), folder
        came = old != new
        while came and old.name == new.name:
            old, new = old.parent, new.parent

        def now(path: str) -> Path:
            return new / Path(path).relative_to(old) if came and Path(path).is_relative_to(old) else Path(path)

        found = replace(self, journal=str(now(self.journal)))
        if store:
            return replace(found, store=store)
        if self.store.startswith(SQLITE):
            before = self.store.removeprefix(SQLITE)
            database = now(before)
            if not database.exists():
                raise UserError(
                    f"{folder} was copied or moved from {self.home} without its MLflow store: to take the runs along, "
                    f"copy {before} to {database} and the folder mlartifacts beside it; or {instead}."
                    if came
                    else f"the MLflow store {database} of {folder} is gone: bring it back, or {instead}."
                )
            found = replace(found, store=f"{SQLITE}{database}")
        if came and found.store == self.store and Path(self.home).exists():
            raise UserError(
                f"{folder} is a copy of {self.home} and would go on in its MLflow run in {self.store}: {instead}."
            )
        return found
