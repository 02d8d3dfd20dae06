"""A ladder's folder, on disk or in object storage: begun once, and continued with the options that it was begun with.

``OUT/NAME/`` holds ``ladder.json`` (the options, and the parent run in MLflow), a folder for each run and, at the end,
the files for people. In object storage the driver works in a local copy, and sends each file as it is written.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infra.claim import sole_user
from infra.errors import UserError
from infra.place import Place, WorkingCopy
from infra.schema import from_json
from infra.storage import write_json
from infra.tracking.key import RunKey
from train.checkpoint.run_folder import make
from train.ladder.suites import nearest

KEPT = "ladder.json"


@contextmanager
def opened(place: Place, *, fresh: bool) -> Iterator[WorkingCopy]:
    """Hold ``place`` against other commands, for the block's duration; yields where to write.

    A ``fresh`` one is made. Raises ``UserError`` when another command runs the ladder.
    """
    if fresh and not place.remote:
        make(place.folder)
    elif not fresh and not place.exists(KEPT):
        raise _absent(place)
    with sole_user(place, f"another command runs the ladder in {place}: wait for it, or stop it."):
        yield WorkingCopy.of(place, fresh=fresh, wanted=lambda name: "/checkpoints/" not in name)


def begin(copy: WorkingCopy, options: Mapping[str, Any], key: RunKey) -> None:
    """Note what a new ladder is."""
    write_json(copy.folder / KEPT, {"options": options, "key": key.kept_in(copy.place.address)})
    copy.send(KEPT)


def kept(copy: WorkingCopy) -> dict[str, Any]:
    """What :func:`begin` noted. Raises ``UserError`` when it is damaged."""
    path = copy.folder / KEPT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"options": dict(found["options"]), "key": from_json(RunKey, found["key"], "its key")}
    except (OSError, ValueError, KeyError, TypeError) as damage:
        raise damaged(copy, damage) from damage


def damaged(copy: WorkingCopy, damage: Exception) -> UserError:
    """The sentence about a damaged ``ladder.json``."""
    return UserError(f"--resume {copy.place.name}: {copy.place / KEPT} is damaged ({damage}); begin a new ladder.")


def _absent(place: Place) -> UserError:
    known = [] if place.remote else [path.parent.name for path in place.parent.folder.glob(f"*/{KEPT}")]
    hint = nearest(place.name, known) if known else "."
    return UserError(f"--resume {place.name}: there is no ladder in {place}{hint}")
