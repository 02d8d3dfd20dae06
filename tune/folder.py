"""The folder of a search or a ladder: made once, locked by one driver, and continued only as what it was.

``OUT/NAME/`` holds ``search.json`` or ``ladder.json`` (:class:`Kept`), ``trials/`` (a JSON file per finished trial)
and, at the end, the files for people. In object storage the driver works in a local copy and sends each file as it is
written.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from infra.errors import UserError, nearest
from infra.lease import sole_user
from infra.schema import from_json, strict
from infra.storage import clear_temporaries, write_json
from infra.storage_dir import StorageDir, WorkingCopy
from infra.tracking.key import RunKey
from tune.config import ExperimentConfig

Config = TypeVar("Config", bound=ExperimentConfig)

TRIALS = "trials"


@strict
@dataclass(frozen=True)
class Kept:
    """What an experiment is."""

    config: dict[str, Any]
    identity: dict[str, Any]
    """What it must share with one that continues it."""
    parent: RunKey
    """Its run in MLflow."""


def place_of(out: str, name: str) -> StorageDir:
    """Where the experiment ``name`` belongs."""
    place = StorageDir.of(out)
    return place / name if place.remote else StorageDir.of(place.folder / name)


def kept(place: StorageDir, kind: str) -> Kept:
    """What :func:`begin` has kept of the ``search`` or ``ladder`` in ``place``."""
    try:
        content = place.read(f"{kind}.json")
    except OSError:
        known = [] if place.remote else [path.parent.name for path in place.parent.folder.glob(f"*/{kind}.json")]
        hint = nearest(place.name, known) if known else "."
        raise UserError(f"--resume {place.name}: there is no {kind} in {place}{hint}") from None
    try:
        return from_json(Kept, json.loads(content), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"--resume: {place}/{kind}.json is damaged ({damage}); begin a new {kind}.") from damage


def kept_config(place: StorageDir, kind: type[Config]) -> Config:
    return from_json(kind, kept(place, kind.kind).config, f"--resume: {place}/{kind.kind}.json is damaged; it")


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
    values = {"config": config.to_json(), "identity": identity, "parent": parent.kept_in(copy.place.address)}
    write_json(copy.folder / f"{config.kind}.json", values)
    copy.send(f"{config.kind}.json")


def resumed_parent(place: StorageDir, kind: str, identity: dict[str, Any]) -> RunKey:
    """The parent run of the experiment in ``place``. Raises ``UserError`` when ``identity`` is another one's."""
    there, now = kept(place, kind), json.loads(json.dumps(identity))
    changed = [
        f"{name} was {there.identity.get(name)!r} and is now {now.get(name)!r}"
        for name in sorted(set(there.identity) | set(now))
        if there.identity.get(name) != now.get(name)
    ]
    if changed:
        raise UserError(
            f"--resume {place.name}: that {kind} was another one ({'; '.join(changed)}). Leave these flags out to "
            f"continue it, or begin a new {kind} with another --name."
        )
    parent = there.parent.valid_in(place, f"begin a new {kind}")
    from infra.tracking.store import reopen_run

    reopen_run(parent)
    return parent
