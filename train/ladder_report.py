"""A finished ladder on disk, on the terminal and in MLflow, and two ladders side by side."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from infra.command import UserError, console
from infra.storage import atomic_file, write_json
from infra.tracking import Tracker
from train.charts import loss_chart, speed_chart
from train.climb import Measured
from train.standings import Row, helps, legend, markdown, standings, table
from train.suites import Suite


def publish(
    suite: Suite,
    controls: list[Measured],
    rungs: list[Measured],
    folder: Path,
    tracker: Tracker,
    before: dict[str, Any] | None,
) -> None:
    """Print, write and record what the ladder found; ``before`` is another ladder to set beside it."""
    device = (controls[0].result or {})["device"]
    rows = standings(controls, rungs, folder)
    ran = [measured for measured in (controls[0], *rungs) if measured.result]
    write_json(folder / "standings.json", {"suite": suite.name, "device": device, "rows": [asdict(r) for r in rows]})
    with atomic_file(folder / "summary.md") as file:
        file.write(markdown(suite, rows).encode())
    title = f"{suite.title}; {device}"
    pictures = [
        speed_chart(rows, title, folder / "speed.png"),
        loss_chart({measured.name: folder / measured.folder for measured in ran}, title, folder / "loss.png"),
    ]
    console.print(table(suite, rows), width=max(console.width, 120))
    for line in legend(suite, rows):
        console.print(line)
    if not suite.climbs:
        made = Table("rung", "saves memory", "faster", box=None, padding=(0, 2, 0, 0))
        for line in helps(rows):
            made.add_row(*line)
        console.print(made)
    if before:
        console.print(comparison(before, rows, device))
    console.print(f"table, charts and every run: {folder}")
    for path in (folder / "standings.json", folder / "summary.md", *pictures):
        tracker.file(path)
    tracker.note(markdown(suite, rows))
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
                speeds = [{"name": row["name"], "speed": row["speed"]} for row in found["rows"]]
                return {"name": text, "device": found["device"], "rows": speeds}
            except (ValueError, KeyError, TypeError) as damage:
                raise UserError(f"--compare {text}: {path} is damaged ({damage}); run that ladder again.") from damage
    raise UserError(f"--compare {text}: there is no finished ladder in {out / text} or {text}.")


def comparison(before: dict[str, Any], rows: list[Row], device: str) -> Table:
    """Two ladders side by side, matched by the names of their rungs."""
    made = Table(
        "rung", f"{before['name']} ({before['device']})", f"this ({device})", "ratio",
        title="Beside the other ladder", title_justify="left", box=None, padding=(0, 2, 0, 0),
    )  # fmt: skip
    others = {row["name"]: row["speed"] for row in before["rows"]}
    for row in rows:
        other = others.get(row.name)
        ratio = f"{row.speed / other:.2f}x" if row.speed and other else "-"
        made.add_row(
            row.name, f"{other:,.0f}" if other else "-", f"{row.speed:,.0f}" if row.speed else "-", ratio
        )  # fmt: skip
    return made
