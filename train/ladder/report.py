"""A finished ladder on disk, on the terminal and in MLflow, and two ladders side by side."""

import json
from dataclasses import asdict
from typing import Any

from rich.table import Table

from infra import provenance
from infra.console import console
from infra.errors import UserError
from infra.markdown import facts
from infra.object_storage import is_remote
from infra.place import Place
from infra.storage import write_json, write_text
from infra.tracking.tracker import Tracker
from train.config import config_from_json
from train.ladder import study
from train.ladder.charts import loss_chart, speed_chart
from train.ladder.losses import band, loss_curve
from train.ladder.published import NAME
from train.ladder.runner import Ladder, Measured
from train.ladder.standings import Part, legend, markdown, opening_lines, parts, standings, table


def publish(
    ladder: Ladder,
    controls: list[Measured],
    rungs: list[Measured],
    tracker: Tracker,
    before: dict[str, Any] | str | None,
) -> None:
    """Print, write and record what ``ladder`` found; ``before`` is another ladder to compare it with, or the study."""
    assert controls[0].result is not None, "a baseline without a result ends its ladder"
    suite, folder, device = ladder.suite, ladder.folder, controls[0].result.device
    rows = standings(controls, rungs, folder)
    speeds = [control.speed.middle for control in controls if control.speed]
    ran = [run for run in (controls[0], *rungs) if run.result]
    found = {
        "name": folder.name, "device": device, "commit": provenance.commit(), "suite": suite.name, "controls": speeds,
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    write_json(folder / "standings.json", found)
    files = {run.name: str(ladder.copy.place / run.folder / "config.json") for run in ran}
    text = f"{facts(opening_lines(suite, rows, device, files))}\n\n{markdown(suite, rows, speeds)}"
    shown: list[Table | str] = ["", *table(suite, rows, console.width), "", *legend(suite, rows, speeds)]
    shown += [piece for part in parts(suite, rows) for piece in ("", *part.terminal(console.width))]
    compared: list[Part] = []
    said: list[str] = []
    if before == NAME:
        settings = {run.name: config_from_json(run.config, run.folder) for run in ran if run.speed}
        compared, said = study.compare(rows, settings)
    elif isinstance(before, dict):
        heading, *lines = comparison(before, found)
        compared = [Part("Compared with the other ladder", heading, lines)]
    for part in compared:
        text += "\n" + "\n".join(part.markdown())
    text += "".join(f"\n{sentence}\n" for sentence in said)
    shown += [piece for part in compared for piece in ("", *part.terminal(console.width))]
    shown += ["", *said] if said else []
    write_text(folder / "summary.md", text)
    title = f"{suite.title}; {device}"
    losses = {run.name: loss_curve(folder / run.folder) for run in ran}
    varied = band([loss_curve(folder / run.folder) for run in controls if run.result])
    charts = [
        speed_chart(rows, title, folder / "speed.png", cumulative=suite.cumulative),
        loss_chart(losses, varied, title, folder / "loss.png"),
    ]
    for part in shown:
        if isinstance(part, str):
            console.prose(part)
        else:
            console.print(part)
    console.print(f"table, charts and every run: {ladder.copy.place}", markup=False)
    for path in (folder / "standings.json", folder / "summary.md", *charts):
        tracker.file(path)
        ladder.copy.send(path.name)
    tracker.note(text)
    best = max((row for row in rows if row.total), key=lambda row: row.speed or 0.0, default=None)
    tracker.metrics(
        {
            "result/baseline_tokens_per_second": rows[0].speed,
            "result/best_tokens_per_second": best and best.speed,
            "result/best_over_baseline": best and best.total and best.total.ratio,
        }
    )


def load(text: str, out: str) -> dict[str, Any] | str:
    """The standings of an earlier ladder, by its name or folder, or the name of the study. Raises ``UserError``."""
    if text == NAME:
        return text
    for place in (Place.of(text) if is_remote(text) else Place.of(out) / text, Place.of(text)):
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
    raise UserError(f"--compare {text}: there is no finished ladder in {Place.of(out) / text} or {text}.")


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
