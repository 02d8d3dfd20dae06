"""A search's folder: made once, locked by one process, and continued only as the search that it was.

``runs/NAME/`` holds ``search.json`` (what is searched, and the parent run in MLflow), ``trials/`` (a JSON
file per finished trial) and, at the end, the files for people.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from infra import storage
from infra.errors import UserError
from infra.schema import from_json
from infra.storage import clear_temporaries, write_json
from infra.tracking.key import RunKey
from tune.config import SearchConfig

KEPT, TRIALS, LOCK = "search.json", "trials", ".lock"


def kept_config(folder: Path) -> SearchConfig:
    """The settings of the search in ``folder``. Raises ``UserError`` when there is none."""
    try:
        return from_json(SearchConfig, json.loads((folder / KEPT).read_text(encoding="utf-8"))["config"], "it")
    except OSError:
        raise UserError(f"--resume: there is no {folder / KEPT}; 'ls {folder.parent}' lists what was run.") from None
    except (ValueError, KeyError) as damage:
        raise UserError(f"--resume: {folder / KEPT} is damaged ({damage}); begin a new search.") from damage


RENAMED = {"naive": "ablate"}
"""Settings that searches of earlier versions keep under another name."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make and lock ``folder``; the system unlocks it however the process ends. Raises ``UserError``."""
    try:
        (folder / TRIALS).mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
    except OSError as refused:
        raise UserError(f"{folder} cannot be written ({refused.strerror}): name another --out.") from refused
    with storage.lock(folder / LOCK, f"another process runs the search in {folder}: wait for it, or end it."):
        clear_temporaries(folder / TRIALS)
        yield


def begin(folder: Path, config: SearchConfig, identity: dict[str, Any], parent: RunKey) -> None:
    """Note what a new search is."""
    write_json(folder / KEPT, {"config": config.to_json(), "identity": identity, "parent": parent.kept_in(folder)})


def kept_identity(folder: Path) -> dict[str, Any]:
    """What the search in ``folder`` was, under today's names of its settings."""
    kept: dict[str, Any] = json.loads((folder / KEPT).read_text(encoding="utf-8"))["identity"]
    return {RENAMED.get(name, name): value for name, value in kept.items()}


def resumed_parent(folder: Path, identity: dict[str, Any]) -> RunKey:
    """The parent run of the search in ``folder``. Raises ``UserError`` when ``identity`` is another search's."""
    kept = json.loads((folder / KEPT).read_text(encoding="utf-8"))
    there, now = kept_identity(folder), json.loads(json.dumps(identity))
    changed = [
        f"{name} was {there.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(set(there) | set(now))
        if there.get(name) != now.get(name)
    ]
    if changed:
        raise UserError(
            f"--resume {folder.name}: that search was another one ({'; '.join(changed)}). Leave these flags out to "
            "continue it, or begin a new search with another --name."
        )
    parent = from_json(RunKey, kept["parent"], folder / KEPT).found_in(folder, "begin a new search")
    from infra.tracking.store import reopen_run

    reopen_run(parent)
    return parent
