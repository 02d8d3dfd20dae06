"""Adapt a SQLite store of MLflow that was copied or moved to its new place.

MLflow keeps the absolute location of every run's files in the database and has no call that changes it, so that a
copied project would continue to write to the original's folder. This is the only SQL on MLflow's own tables; where
those have changed, the store is refused and nothing is written.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.errors import UserError

FILES = "mlartifacts"
"""The folder next to the database that holds the files of all runs."""

_LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
    ("model_versions", "source"),
)
"""Table and column of every location."""


def relocate(database: Path) -> list[Path]:
    """Have MLflow read and write the files of ``database`` next to it; returns the folders where they were before.

    Raises ``UserError`` when the files were not moved along, and ``sqlite3.Error``.
    """
    here = database.parent
    with closing(sqlite3.connect(database)) as connection, connection:
        found = connection.execute("SELECT artifact_location FROM experiments").fetchall()
        places = {location.rpartition(f"/{FILES}/")[0] for (location,) in found if location.startswith("file:///")}
        before = sorted(Path(unquote(urlsplit(place).path)) for place in places - {"", here.as_uri()})
        for folder in before:
            if (folder / FILES).exists() and not (here / FILES).exists():
                raise UserError(
                    f"the MLflow store {database} was copied or moved from {folder} and would continue to write files "
                    f"there: to move its runs as well, copy {folder / FILES} to {here / FILES}; or give another store "
                    "with --tracking-uri."
                )
            old, new = (f"{place.as_uri()}/{FILES}/" for place in (folder, here))
            for table, column in _LOCATIONS:
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",  # noqa: S608
                    (new, len(old) + 1, len(old), old),
                )
    return before
