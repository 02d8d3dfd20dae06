"""The folder of a search or a ladder: made once, locked by one driver, and continued only as what it was.

``OUT/NAME/`` holds ``search.json`` or ``ladder.json`` (its config, and the parent run in MLflow), ``trials/`` (a JSON
file per finished trial) and, at the end, the files for people. In object storage the driver works in a local copy and
sends each file as it is written.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from infra.errors import UserError, nearest
from infra.lease import sole_user
from infra.schema import from_json
from infra.storage import clear_temporaries, write_json
from infra.storage_dir import StorageDir, WorkingCopy
from infra.tracking.key import RunKey
from tune.config import ExperimentConfig

Config = TypeVar("Config", bound=ExperimentConfig)

TRIALS = "trials"


def place_of(out: str, name: str) -> StorageDir:
    """Where the experiment ``name`` belongs."""
    place = StorageDir.of(out)
    return place / name if place.remote else StorageDir.of(place.folder / name)


def kept_config(place: StorageDir, kind: type[Config]) -> Config:
    """The settings of the experiment in ``place``. Raises ``UserError`` when there is none."""
    content = _content(place, kind.kind)
    try:
        return from_json(kind, json.loads(content)["config"], "it")
    except (ValueError, KeyError, TypeError) as damage:
        file = place / f"{kind.kind}.json"
        raise UserError(f"--resume: {file} is damaged ({damage}); begin a new {kind.kind}.") from damage


def _content(place: StorageDir, kind: str) -> bytes:
    """What :func:`begin` has kept. Raises ``UserError`` where nothing was begun."""
    try:
        return place.read(f"{kind}.json")
    except OSError:
        known = [] if place.remote else [path.parent.name for path in place.parent.folder.glob(f"*/{kind}.json")]
        hint = nearest(place.name, known) if known else "."
        raise UserError(f"--resume {place.name}: there is no {kind} in {place}{hint}") from None


@contextmanager
def locked(place: StorageDir, kind: str) -> Iterator[WorkingCopy]:
    """Make ``place``, and hold it against other drivers however this one ends. Yields where to write what it holds."""
    if place.remote:
        place.refuse_unusable("--out")
    with sole_user(place, f"another process runs the {kind} in {place}: wait for it, or end it."):
        wanted = (f"{kind}.json", f"{TRIALS}/")
        copy = WorkingCopy.of(place, fresh=False, wanted=lambda name: name.startswith(wanted))
        (copy.folder / TRIALS).mkdir(exist_ok=True)
        clear_temporaries(copy.folder / TRIALS)
        yield copy


def begin(copy: WorkingCopy, config: ExperimentConfig, identity: dict[str, Any], parent: RunKey) -> None:
    """Note what a new experiment is."""
    kept = {"config": config.to_json(), "identity": identity, "parent": parent.kept_in(copy.place.address)}
    write_json(copy.folder / f"{config.kind}.json", kept)
    copy.send(f"{config.kind}.json")


def kept_identity(place: StorageDir, kind: str) -> dict[str, Any]:
    """What the experiment in ``place`` was."""
    return json.loads(_content(place, kind))["identity"]


def resumed_parent(place: StorageDir, kind: str, identity: dict[str, Any]) -> RunKey:
    """The parent run of the experiment in ``place``. Raises ``UserError`` when ``identity`` is another one's."""
    there, now = kept_identity(place, kind), json.loads(json.dumps(identity))
    changed = [
        f"{name} was {there.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(set(there) | set(now))
        if there.get(name) != now.get(name)
    ]
    if changed:
        raise UserError(
            f"--resume {place.name}: that {kind} was another one ({'; '.join(changed)}). Leave these flags out to "
            f"continue it, or begin a new {kind} with another --name."
        )
    kept = from_json(RunKey, json.loads(_content(place, kind))["parent"], str(place / f"{kind}.json"))
    parent = kept.valid_in(place, f"begin a new {kind}")
    from infra.tracking.store import reopen_run

    reopen_run(parent)
    return parent
