"""A search's folder: made once, locked by one driver, and continued only as the search that it was.

``OUT/NAME/`` holds ``search.json`` (what is searched, and the parent run in MLflow), ``trials/`` (a JSON
file per finished trial) and, at the end, the files for people. In object storage the driver works in a local copy and
sends each file as it is written.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.claim import sole_user
from infra.errors import UserError
from infra.place import Place, WorkingCopy
from infra.schema import from_json
from infra.storage import clear_temporaries, write_json
from infra.tracking.key import RunKey
from tune.config import SearchConfig

KEPT, TRIALS = "search.json", "trials"


def place_of(out: str, name: str) -> Place:
    """Where the search ``name`` belongs."""
    place = Place.of(out)
    return place / name if place.remote else Place.of(place.folder / name)


def kept_config(place: Place) -> SearchConfig:
    """The settings of the search in ``place``. Raises ``UserError`` when there is none."""
    content = _content(place)
    try:
        return from_json(SearchConfig, json.loads(content)["config"], "it")
    except (ValueError, KeyError) as damage:
        raise UserError(f"--resume: {place / KEPT} is damaged ({damage}); begin a new search.") from damage


def _content(place: Place) -> bytes:
    """The content of ``search.json``. Raises ``UserError`` without one."""
    try:
        return place.read(KEPT)
    except OSError:
        listed = f"look in {place.parent}" if place.remote else f"'ls {place.parent}' lists what was run"
        raise UserError(f"--resume: there is no {place / KEPT}; {listed}.") from None


@contextmanager
def locked(place: Place) -> Iterator[WorkingCopy]:
    """Make ``place``, and hold it against other drivers however this one ends. Yields where to write what it holds.

    Raises ``UserError``.
    """
    if place.remote:
        place.refuse_unusable("--out")
    with sole_user(place, f"another process runs the search in {place}: wait for it, or end it."):
        copy = WorkingCopy.of(place, fresh=False, wanted=lambda name: name == KEPT or name.startswith(f"{TRIALS}/"))
        (copy.folder / TRIALS).mkdir(exist_ok=True)
        clear_temporaries(copy.folder / TRIALS)
        yield copy


def begin(copy: WorkingCopy, config: SearchConfig, identity: dict[str, Any], parent: RunKey) -> None:
    """Note what a new search is."""
    kept = {"config": config.to_json(), "identity": identity, "parent": parent.kept_in(copy.place.address)}
    write_json(copy.folder / KEPT, kept)
    copy.send(KEPT)


def kept_identity(place: Place) -> dict[str, Any]:
    """What the search in ``place`` was."""
    return json.loads(_content(place))["identity"]


def resumed_parent(place: Place, identity: dict[str, Any]) -> RunKey:
    """The parent run of the search in ``place``. Raises ``UserError`` when ``identity`` is another search's."""
    there, now = kept_identity(place), json.loads(json.dumps(identity))
    changed = [
        f"{name} was {there.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(set(there) | set(now))
        if there.get(name) != now.get(name)
    ]
    if changed:
        raise UserError(
            f"--resume {place.name}: that search was another one ({'; '.join(changed)}). Leave these flags out to "
            "continue it, or begin a new search with another --name."
        )
    kept = from_json(RunKey, json.loads(_content(place))["parent"], str(place / KEPT))
    parent = kept.valid_in(place, "begin a new search")
    from infra.tracking.store import reopen_run

    reopen_run(parent)
    return parent
