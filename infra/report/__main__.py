"""Entry: ``python -m infra.report NAME`` writes a run, ladder, search, data set or profile as one HTML file.

In: a folder, by its name in ``--out`` or by its path. Out: ``report.html`` in it, which needs no server and no network.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from infra import command
from infra.console import console
from infra.errors import UserError
from infra.report.folders import page_of
from infra.storage import write_text

REPORT = "report.html"


@dataclass(frozen=True)
class ReportOptions:
    """What to report on."""

    name: Annotated[str, tyro.conf.Positional]
    """Name of a run, ladder, search or profile, or the path of its folder or of a data set's."""
    out: Path = Path("runs")
    """Folder that holds runs."""


def main() -> None:
    """Parse, write, exit."""
    command.run(
        report,
        ReportOptions,
        module="infra.report",
        description="Write a run, ladder, search, data set or profile as one HTML file.",
    )


def report(options: ReportOptions) -> int:
    """Write the report next to the files it is made from; returns the exit code. Raises ``UserError``."""
    places = (options.out / options.name, Path(options.name))
    folder = next((place for place in places if options.name and place.is_dir()), None)
    if folder is None:
        raise UserError(f"there is no folder {places[0]} or {places[1]}: give a run's name or the path of a folder.")
    path = folder / REPORT
    write_text(path, page_of(folder).html())
    console.print(f"report: {path}", markup=False)
    return 0


if __name__ == "__main__":
    main()
