"""A ladder for people: a line per run; at the end a report, charts and files; two ladders side by side."""

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
from tune.suite import study
from tune.suite.charts import band, loss_chart, speed_chart
from tune.suite.published import NAME
from tune.suite.runs import Ladder
from tune.suite.standings import closing, legend, loss_curve, opening_lines, parts, standings
from tune.trial.row import TrialRow, measured


def publish(
    ladder: Ladder, rows: Sequence[TrialRow], tracker: Tracker, *, before: dict[str, Any] | str | None = None
) -> bool:
    """Print, write and record what was found; ``before`` is another ladder to compare it with, or the study.

    Returns True: its baseline has a speed.
    """
    suite, folder, out = ladder.suite, ladder.folder, ladder.place.parent
    controls, rungs = ladder.measured(rows)
    ran = [run for run in (controls[0], *rungs) if run.row and run.config and run.speed]
    assert controls[0].row is not None, "a baseline without a speed ends its ladder"
    device = controls[0].row.device or ladder.device
    found = standings(controls, rungs, out)
    speeds = [control.speed.middle for control in controls if control.speed]
    kept = {
        "name": ladder.place.name, "device": device, "commit": provenance.commit(), "suite": suite.name,
        "controls": speeds, "rows": [asdict(row) for row in found],
    }  # fmt: skip
    write_json(folder / "standings.json", kept)
    fastest = max(ran, key=lambda run: run.speed.middle if run.speed else 0.0)
    if fastest.config and fastest.row:
        write_json(folder / "best.json", best_json(fastest.config, fastest.row))
    pieces = [closing(suite, found), listed(legend(suite, found, speeds)), *parts(suite, found)]
    if before == NAME:
        compared, said = study.compare(found, {run.name: run.config for run in ran if run.config})
        pieces += [*compared, *said]
    elif isinstance(before, dict):
        heading, *lines = comparison(before, kept)
        pieces.append(Part("Compared with the other ladder", heading, lines))
    told = Report(opening_lines(suite, found, device, ladder.place / "best.json"), pieces)
    title = f"{suite.title}; {device}"
    losses = {run.name: loss_curve(run.row) for run in ran if run.row}
    varied = band([loss_curve(run.row) for run in controls if run.row])
    charts = [
        speed_chart(found, title, folder / "speed.png", cumulative=suite.cumulative),
        loss_chart(losses, varied, title, folder / "loss.png"),
    ]
    ladder.publish(told, [folder / "standings.json", folder / "best.json", *charts], tracker)
    best = max((row for row in found if row.total), key=lambda row: row.speed or 0.0, default=None)
    tracker.metrics(
        {
            "result/baseline_tokens_per_second": found[0].speed,
            "result/best_tokens_per_second": best and best.speed,
            "result/best_over_baseline": best and best.total and best.total.ratio,
        }
    )
    return True


def best_json(config: TrainConfig, row: TrialRow) -> dict[str, Any]:
    """The fastest rung as a search writes its winner: the config without the ladder's length, and its measurements."""
    usual = TrainConfig()
    ends = {} if config.stream else {"steps": None, "time_budget": None}  # a stream has no end of its own
    whole = replace(config, within=None, cycle=usual.cycle, keep_checkpoints=usual.keep_checkpoints, **ends)
    assert row.speed is not None, "the fastest has a speed"
    return {"config": whole.to_json(), "measured": measured(row.speed, row.memory, [row])}


def load(text: str, out: str) -> dict[str, Any] | str:
    """The standings of an earlier ladder, by its name or folder, or the name of the study."""
    if text == NAME:
        return text
    for place in (StorageDir.of(text) if is_remote(text) else StorageDir.of(out) / text, StorageDir.of(text)):
        try:
            found = json.loads(place.read("standings.json"))
            speeds = [{"name": row["name"], "speed": row["speed"] and float(row["speed"])} for row in found["rows"]]
            return {"name": text, "device": found["device"], "commit": found["commit"], "rows": speeds}
        except OSError:
            continue
        except UserError:  # of storage
            raise
        except (ValueError, KeyError, TypeError) as damage:
            raise UserError(
                f"--compare {text}: {place / 'standings.json'} is damaged ({damage}); run that ladder again."
            ) from damage
    raise UserError(f"--compare {text}: there is no finished ladder in {StorageDir.of(out) / text} or {text}.")


def comparison(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, ...]]:
    """Two ladders side by side, matched by the names of their rungs: the heading, then one line per rung."""
    others = {row["name"]: row["speed"] for row in before["rows"]}
    lines: list[tuple[str, ...]] = [("rung", _whose(before), _whose(now), "ratio")]
    for row in now["rows"]:
        speed, other = row["speed"], others.get(row["name"])
        ratio = f"{speed / other:.2f}x" if speed and other else "-"
        lines.append((row["name"], f"{other:,.0f}" if other else "-", f"{speed:,.0f}" if speed else "-", ratio))
    return lines


def _whose(ladder: dict[str, Any]) -> str:
    """A ladder's name, device and commit."""
    return f"{ladder['name']} ({', '.join(filter(None, (ladder['device'], ladder['commit'][:9])))})"
