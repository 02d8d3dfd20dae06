"""What a person gets of a ladder at its end: a report, charts and files; and two ladders side by side."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from infra import provenance
from infra.errors import UserError
from infra.object_storage import is_remote
from infra.storage import write_json
from infra.storage_dir import StorageDir
from infra.table import Part, Report, listed
from infra.tracking.tracker import Tracker
from train.config import TrainConfig
from train.intervals import Estimate
from tune import charts
from tune.suite import study
from tune.suite.runs import Ladder, Measured
from tune.suite.standings import closing, legend, opening_lines, parts, standings
from tune.trial.row import TrialRow, flat_row, measured


def publish(
    ladder: Ladder, rows: Sequence[TrialRow], tracker: Tracker, *, before: dict[str, Any] | str | None = None
) -> bool:
    """Print, write and record what was found; ``before`` is another ladder to compare it with, or the study.

    Returns True: its baseline has a speed.
    """
    suite, folder, out = ladder.suite, ladder.folder, ladder.place.parent
    controls, rungs = ladder.measured(rows)
    found = standings(controls, rungs, out)
    ran = [(rung, rung.row, rung.speed) for rung in found if rung.row and rung.speed]
    base, fastest = ran[0], max(ran, key=lambda each: each[2].middle)
    device = base[1].device or ladder.device
    repeated = [control.row for control in controls if control.row]
    speeds = [row.speed.middle for row in repeated if row.speed]
    kept = {
        "name": ladder.place.name, "device": device, "commit": provenance.commit(), "suite": suite.name,
        "controls": speeds, "rows": list(map(as_json, found)),
    }  # fmt: skip
    write_json(folder / "standings.json", kept)
    write_json(folder / "best.json", best_json(*fastest))
    pieces = [closing(suite, found), listed(legend(suite, found, speeds)), *parts(suite, found)]
    if before == study.NAME:
        compared, said = study.compare(suite.name, found)
        pieces += [*compared, *said]
    elif isinstance(before, dict):
        pieces.append(comparison(before, kept))
    title = f"{suite.title}; {device}"
    reached = [base[2].middle * (rung.total.ratio if rung.total else 1.0) for rung, *_ in ran] * suite.cumulative
    figures = {
        "speed": charts.speeds(title, [(rung.name, speed, row.memory or 0) for rung, row, speed in ran], reached),
        "loss": charts.losses(title, [(rung.name, row) for rung, row, _ in ran], repeated),
    }
    if before == study.NAME and suite.name not in study.EFFECTS:
        figures["study"] = study.picture()
    told = Report(opening_lines(suite, found, device, ladder.place / "best.json"), pieces)
    ladder.publish(told, ["standings.json", "best.json"], figures, tracker)
    numbers = {"result/baseline_tokens_per_second": base[2].middle}
    if gains := [(speed.middle, rung.total.ratio) for rung, _, speed in ran if rung.total]:
        best, gain = max(gains)
        numbers |= {"result/best_tokens_per_second": best, "result/best_over_baseline": gain}
    tracker.metrics(numbers)
    return True


def as_json(rung: Measured) -> dict[str, Any]:
    """What standings.json keeps of a rung."""
    own = {name: value for name, value in asdict(rung).items() if name not in ("row", "config")}
    own |= {"batch": rung.batch, "speed": rung.speed and rung.speed.middle, "ceiling": rung.ceiling}
    return (flat_row(rung.row) if rung.row else {}) | own


def best_json(rung: Measured, row: TrialRow, speed: Estimate) -> dict[str, Any]:
    """The fastest rung as a search writes its winner: the config without the ladder's length, and its measurements."""
    usual, config = TrainConfig(), rung.config
    assert config is not None, "it has run"
    ends = {} if config.stream else {"steps": None, "time_budget": None}  # a stream has no end of its own
    whole = replace(config, within=None, cycle=usual.cycle, keep_checkpoints=usual.keep_checkpoints, **ends)
    return {"config": whole.to_json(), "measured": measured(speed, row.memory, [row])}


def load(text: str, out: str) -> dict[str, Any] | str:
    """The standings of an earlier ladder, by its name or folder, or the name of the study."""
    if text == study.NAME:
        return text
    named = StorageDir.of(text) if is_remote(text) else StorageDir.of(out) / text
    place = next((each for each in (named, StorageDir.of(text)) if each.exists("standings.json")), None)
    if place is None:
        raise UserError(f"--compare {text}: there is no finished ladder in {StorageDir.of(out) / text} or {text}.")
    content = place.read("standings.json")
    try:
        found = json.loads(content)
        speeds = [{"name": row["name"], "speed": row["speed"] and float(row["speed"])} for row in found["rows"]]
        return {"name": text, "device": found["device"], "commit": found["commit"], "rows": speeds}
    except (ValueError, KeyError, TypeError) as damage:
        file = place / "standings.json"
        raise UserError(f"--compare {text}: {file} is damaged ({damage}); run that ladder again.") from damage


def comparison(before: dict[str, Any], now: dict[str, Any]) -> Part:
    """Two ladders side by side, matched by the names of their rungs."""
    others = {row["name"]: row["speed"] for row in before["rows"]}
    lines = []
    for row in now["rows"]:
        speed, other = row["speed"], others.get(row["name"])
        ratio = f"{speed / other:.2f}x" if speed and other else "-"
        lines.append((row["name"], f"{other:,.0f}" if other else "-", f"{speed:,.0f}" if speed else "-", ratio))
    return Part("Compared with the other ladder", ("rung", _whose(before), _whose(now), "ratio"), lines)


def _whose(ladder: dict[str, Any]) -> str:
    return f"{ladder['name']} ({', '.join(filter(None, (ladder['device'], ladder['commit'][:9])))})"
