"""A ladder for people: a line per run; the closing table on the terminal, on disk and in MLflow; two side by side."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from infra import provenance
from infra.console import console
from infra.errors import UserError
from infra.markdown import facts
from infra.object_storage import is_remote
from infra.storage import write_json, write_text
from infra.storage_dir import StorageDir
from infra.tracking.tracker import Tracker
from infra.units import GB, format_duration
from train.config import TrainConfig
from tune.suite import study
from tune.suite.charts import band, loss_chart, speed_chart
from tune.suite.published import NAME
from tune.suite.runs import Ladder
from tune.suite.standings import Part, legend, loss_curve, markdown, opening_lines, parts, standings, table
from tune.trial.row import TrialRow, circumstances


@dataclass(frozen=True)
class LadderReport:
    """What is said of ``ladder``; ``before`` is another ladder to compare it with, or the study."""

    ladder: Ladder
    before: dict[str, Any] | str | None = None

    def line(self, row: TrialRow) -> str:
        """A finished run as one line."""
        parts = [f"{row.number:3d} {row.name}"]
        if row.speed:
            speed = row.speed
            parts += [f"{speed.middle:,.0f} ± {(speed.high - speed.low) / 2 / speed.middle:.1%} tokens/s"]
        if row.memory is not None:
            parts.append(f"{row.memory / GB:.2f} GB")
        if row.train_loss is not None:
            parts.append(f"loss {row.train_loss:.3f}" + (f"/{row.val_loss:.3f}" if row.val_loss is not None else ""))
        return " | ".join([*parts, f"{row.outcome}: {row.reason}"])

    def progress(self, rows: Sequence[TrialRow]) -> str:
        """The time spent, and about how much is left."""
        spent = sum(row.seconds for row in rows)
        left = max(0, 1 + 2 * len(self.ladder.suite.rungs) - len(rows)) * spent / len(rows)
        return f"    spent {format_duration(round(spent))} | about {format_duration(round(left))} left"

    def publish(self, rows: Sequence[TrialRow], tracker: Tracker) -> bool:
        """Print, write and record what was found."""
        ladder = self.ladder
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
        opening = facts(opening_lines(suite, found, device, ladder.place / "best.json"))
        text = f"{opening}\n\n{markdown(suite, found, speeds)}"
        shown: list[Table | str] = ["", *table(suite, found, console.width), "", *legend(suite, found, speeds)]
        shown += [piece for part in parts(suite, found) for piece in ("", *part.terminal(console.width))]
        compared: list[Part] = []
        said: list[str] = []
        if self.before == NAME:
            compared, said = study.compare(found, {run.name: run.config for run in ran if run.config})
        elif isinstance(self.before, dict):
            heading, *lines = comparison(self.before, kept)
            compared = [Part("Compared with the other ladder", heading, lines)]
        for part in compared:
            text += "\n" + "\n".join(part.markdown())
        text += "".join(f"\n{sentence}\n" for sentence in said)
        shown += [piece for part in compared for piece in ("", *part.terminal(console.width))]
        shown += ["", *said] if said else []
        write_text(folder / "summary.md", text)
        title = f"{suite.title}; {device}"
        losses = {run.name: loss_curve(run.row) for run in ran if run.row}
        varied = band([loss_curve(run.row) for run in controls if run.row])
        charts = [
            speed_chart(found, title, folder / "speed.png", cumulative=suite.cumulative),
            loss_chart(losses, varied, title, folder / "loss.png"),
        ]
        for part in shown:
            if isinstance(part, str):
                console.prose(part)
            else:
                console.print(part)
        console.print(f"table, charts and every run: {ladder.place}", markup=False)
        for path in (folder / "standings.json", folder / "summary.md", folder / "best.json", *charts):
            tracker.file(path)
            ladder.send(path.name)
        tracker.note(text)
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
    measured = {
        "tokens_per_second": row.tokens_per_second, "low": row.low, "high": row.high, "memory_bytes": row.memory,
        "runs": 1, "tied_with": [],
    }  # fmt: skip
    return {"config": whole.to_json(), "measured": measured | circumstances([row])}


def load(text: str, out: str) -> dict[str, Any] | str:
    """The standings of an earlier ladder, by its name or folder, or the name of the study. Raises ``UserError``."""
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
