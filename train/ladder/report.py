"""A finished ladder on disk, on the terminal and in MLflow, and two ladders side by side."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from infra import provenance
from infra.command import console, escape
from infra.errors import UserError
from infra.storage import write_json, write_text
from infra.tracking.tracker import Tracker
from train.ladder.charts import loss_chart, speed_chart
from train.ladder.runner import Measured
from train.ladder.standings import Row, helps, legend, markdown, standings, table
from train.ladder.suites import Suite


def publish(
    suite: Suite,
    controls: list[Measured],
    rungs: list[Measured],
    folder: Path,
    tracker: Tracker,
    before: dict[str, Any] | None,
) -> None:
    """Print, write and record what the ladder found; ``before`` is another ladder to set beside it."""
    assert controls[0].result is not None, "a baseline without a result ends its ladder"
    here = {"name": folder.name, "device": controls[0].result.device, "commit": provenance.commit()}
    rows = standings(controls, rungs, folder)
    speeds = [control.speed.middle for control in controls if control.speed]
    ran = [measured for measured in (controls[0], *rungs) if measured.result]
    found = here | {"suite": suite.name, "controls": speeds, "rows": [asdict(row) for row in rows]}
    write_json(folder / "standings.json", found)
    text = markdown(suite, rows, speeds)
    beside = comparison(before, found) if before else []
    if beside:
        heading, *body = beside
        lines = ["", f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
        text += "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in body)]) + "\n"
    write_text(folder / "summary.md", text)
    title = f"{suite.title}; {here['device']}"
    pictures = [
        speed_chart(rows, title, folder / "speed.png"),
        loss_chart({measured.name: folder / measured.folder for measured in ran}, title, folder / "loss.png"),
    ]
    shown = table(suite, rows)
    shown.width = console.measure(shown, options=console.options.update(width=1000)).maximum  # or numbers are cut off
    console.print(shown)
    for line in legend(suite, rows, speeds):
        console.print(line, markup=False)
    if not suite.climbs:
        made = Table("rung", "saves memory", "faster", box=None, padding=(0, 2, 0, 0))
        for line in helps(rows):
            made.add_row(*map(escape, line))
        console.print(made)
    if beside:
        heading, *body = beside
        made = Table(
            *map(escape, heading), title="Beside the other ladder", title_justify="left", box=None, padding=(0, 2, 0, 0)
        )
        for line in body:
            made.add_row(*map(escape, line))
        console.print(made)
    console.print(f"table, charts and every run: {folder}", markup=False)
    for path in (folder / "standings.json", folder / "summary.md", *pictures):
        tracker.file(path)
    tracker.note(text)
    tracker.metrics(_metrics(rows))


def _metrics(rows: list[Row]) -> dict[str, float | None]:
    """The ladder as a curve: its speed at each rung's number is charted by MLflow from the children; here the ends."""
    speeds = [row for row in rows if row.total]
    best = max(speeds, key=lambda row: row.speed or 0.0, default=None)
    return {
        "result/baseline_tokens_per_second": rows[0].speed,
        "result/best_tokens_per_second": best and best.speed,
        "result/best_over_baseline": best and best.total and best.total.ratio,
    }


def load(text: str, out: Path) -> dict[str, Any]:
    """The standings that an earlier ladder left, by its name or folder. Raises ``UserError``."""
    for folder in (out / text, Path(text)):
        path = folder / "standings.json"
        if path.is_file():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
                speeds = [{"name": row["name"], "speed": row["speed"] and float(row["speed"])} for row in found["rows"]]
                return {"name": text, "device": found["device"], "commit": found.get("commit", ""), "rows": speeds}
            except (ValueError, KeyError, TypeError) as damage:
                raise UserError(f"--compare {text}: {path} is damaged ({damage}); run that ladder again.") from damage
    raise UserError(f"--compare {text}: there is no finished ladder in {out / text} or {text}.")


def comparison(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, ...]]:
    """Two ladders side by side, matched by the names of their rungs: the heading, then a line a rung."""
    others = {row["name"]: row["speed"] for row in before["rows"]}
    lines: list[tuple[str, ...]] = [("rung", _whose(before), _whose(now), "ratio")]
    for row in now["rows"]:
        speed, other = row["speed"], others.get(row["name"])
        ratio = f"{speed / other:.2f}x" if speed and other else "-"
        lines.append((row["name"], f"{other:,.0f}" if other else "-", f"{speed:,.0f}" if speed else "-", ratio))
    return lines


def _whose(ladder: dict[str, Any]) -> str:
    """A ladder by its name, its device and the commit that ran it."""
    return f"{ladder['name']} ({', '.join(filter(None, (ladder['device'], ladder['commit'][:9])))})"
