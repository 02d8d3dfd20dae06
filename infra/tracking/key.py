"""The key to a run in MLflow, which a command saves for the one that continues its work.

Separate from ``infra.tracking.tracker``, because importing MLflow takes two seconds that ``--help`` and error messages
need not wait for.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from infra.errors import UserError
from infra.place import Place
from infra.schema import strict, to_json

SQLITE = "sqlite:///"


@strict
@dataclass(frozen=True)
class RunKey:
    """All that is needed to write to an existing run."""

    store: str
    experiment_id: str
    run_id: str
    journal: str
    """Folder for entries that could not be delivered; absolute, because work can be continued from any folder."""
    home: str = ""
    """The folder that the key is saved in, absolute; empty if it is not saved."""

    def kept_in(self, folder: Path | str) -> dict[str, str]:
        """The key as JSON values for a file in ``folder``, an absolute path or a URI."""
        return to_json(replace(self, home=str(folder)))

    def valid_in(self, place: Place, instead: str) -> "RunKey":
        """The key as it is valid on this machine for what was begun in ``place``, where it was read.

        Raises ``UserError`` when its store is not here. The sentence ends with what to do ``instead``.
        """
        if not place.remote:
            return self.found_in(place.folder, instead)
        found = self.on_this_machine()
        if found is None:
            raise UserError(
                f"the MLflow store of {place}, {self.store}, is on another machine: continue it there, or {instead} "
                "with --tracking-uri of a server."
            )
        return found

    def on_this_machine(self, store: str | None = None) -> "RunKey | None":
        """The key of a run in object storage, as it is valid on this machine: with ``store`` if that is given.

        None where the store is a database on the disk of another machine.
        """
        store = store or self.store
        if store.startswith(SQLITE) and not Path(store.removeprefix(SQLITE)).exists():
            return None
        return replace(self, store=store, journal=str(Path(Path(self.journal).name).resolve()))

    def found_in(self, folder: Path, instead: str, *, store: str | None = None) -> "RunKey":
        """The key as it is valid in ``folder``, where it was read; with its store, the project may have been moved.

        Raises ``UserError`` when the store was not moved along, and when ``folder`` is a copy that shares the store of
        its original: nothing is written to another folder's run. The sentence ends with what to do ``instead``. A
        ``store`` that the user names is used as it is.
        """
        old, new = Path(self.home), folder
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
                    f"{folder} was copied or moved from {self.home} without its MLflow store: to keep its runs, "
                    f"copy {before} to {database}, and the folder mlartifacts next to it; or {instead}."
                    if came
                    else f"the MLflow store {database} of {folder} does not exist: restore it, or {instead}."
                )
            found = replace(found, store=f"{SQLITE}{database}")
        if came and found.store == self.store and Path(self.home).exists():
            raise UserError(
                f"{folder} is a copy of {self.home} and would continue its MLflow run in {self.store}: {instead}."
            )
        return found
