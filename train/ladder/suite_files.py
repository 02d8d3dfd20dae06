"""Ladders of one's own: a Python or TOML file becomes a suite, or is refused before its first rung is run.

In: the text of ``--suite``, and the config that its ladder starts from. Out: a ``Suite``, ours by its
name or the user's by its file.
"""

import runpy
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.errors import UserError
from train.config import TrainConfig
from train.ladder.suites import SUITES, Changes, Rung, Suite, apply, nearest


def find_suite(text: str, start: TrainConfig) -> Suite:
    """The suite called ``text``, or the one in the Python or TOML file at that path, which goes on from ``start``.

    Raises ``UserError``.
    """
    if text in SUITES:
        return SUITES[text]
    path = Path(text)
    if path.suffix in (".toml", ".py"):
        suite = _from_toml(path) if path.suffix == ".toml" else _from_python(path)
        _refuse_mistakes(suite, path, start)
        return suite
    raise UserError(f"--suite {text!r} is not known{nearest(text, SUITES)} A file ends in .py or .toml.")


def _from_toml(path: Path) -> Suite:
    """``title``, ``climbs``, a table ``base`` and tables ``rung`` with a ``name``, ``new_mathematics`` and fields."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--suite {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as damage:
        raise UserError(f"--suite {path} cannot be read as TOML: {damage}.") from damage
    known = ("title", "climbs", "base", "rung")
    for name in values:
        if name not in known:
            raise UserError(f"--suite {path} has {name!r}, which no suite has{nearest(name, known)}")
    entries, base = values.get("rung"), values.get("base", {})
    if not (isinstance(entries, list) and entries and all(isinstance(entry, dict) for entry in entries)):
        raise UserError(f"--suite {path} has no [[rung]].")
    if not isinstance(base, dict):
        raise UserError(f"--suite {path}: base is {base!r}; write a table, [base].")
    rungs = []
    for number, entry in enumerate(entries, 1):
        name = entry.pop("name", None)
        if not isinstance(name, str):
            raise UserError(f"--suite {path}: rung {number} has no name.")
        rungs.append(Rung(name, flat(entry), _switch(entry, "new_mathematics", path)))
    title = str(values.get("title", path.stem))
    return Suite(path.stem, title, flat(base), tuple(rungs), _switch(values, "climbs", path))


def _switch(values: Mapping[str, Any], name: str, path: Path) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"--suite {path}: {name} is {value!r}; write true or false.")
    return value


def _from_python(path: Path) -> Suite:
    """A file that makes ``SUITE``, a :class:`Suite` or no more than a list of rungs."""
    if not path.is_file():
        raise UserError(f"--suite {path} does not exist.")
    try:
        found = runpy.run_path(str(path)).get("SUITE")
    except (Exception, SystemExit) as failure:
        raise UserError(f"--suite {path} cannot be run: {type(failure).__name__}: {failure}.") from failure
    if isinstance(found, list):
        found = Suite(path.stem, path.stem, {}, tuple(found))
    if not isinstance(found, Suite):
        raise UserError(
            f"--suite {path} makes no SUITE; write SUITE = [Rung(...), ...] or Suite(...), both of train.ladder.suites."
        )
    for rung in found.rungs:
        if not (isinstance(rung, Rung) and isinstance(rung.changes, Mapping)):
            raise UserError(f"--suite {path}: {rung!r} is no rung; write Rung('name', {{'setting': value}}).")
    if not found.rungs:
        raise UserError(f"--suite {path} has no rung.")
    return found


def _refuse_mistakes(suite: Suite, path: Path, start: TrainConfig) -> None:
    """Raise ``UserError`` for a config that no machine could run, before any rung is run.

    What is right and only cannot be run here becomes a row with its reason when its turn comes.
    """

    def made(name: str, state: TrainConfig, changes: Changes) -> TrainConfig:
        return apply(state, changes, f"--suite {path}, {name}")

    anywhere = replace(start, device="cuda")  # of which the rules refuse nothing, nor ask whether there is one
    state = made("the base", anywhere, suite.base)
    for rung in suite.rungs:
        config = made(f"rung {rung.name!r}", state, rung.changes)
        state = config if suite.climbs else state


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML's nested ``[rung.model]`` as ``model.field``; lists as tuples, as configs hold them."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= {f"{name}.{inner}": item for inner, item in value.items()}
        elif name != "new_mathematics":
            result[name] = tuple(value) if isinstance(value, list) else value
    return result
