"""The report of a ladder with its tables, charts and files, and the comparison of two ladders."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from infra.charts import describe_conditions
from infra.cli.table import Report, Table, bullet_list
from infra.device import provenance
from infra.errors import UserError
from infra.facts import Fact
from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from train.config import TrainConfig
from train.data.sources import source_of
from train.intervals import Estimate
from train.reporting.next_steps import after_comparison
from train.search_reference import SearchReference
from tune.experiment.folder import ExperimentResult
from tune.reporting.charts import SpeedRow
from tune.suite import charts, study
from tune.suite.profiles import PROFILES, draw_timelines, profile_rungs, profile_tables, record_rung
from tune.suite.replay import Ladder
from tune.suite.results import compare_rungs, detail_tables, legend, results_table, summary_fields
from tune.suite.runs import RungResult
from tune.trial.row import TrialRow, flatten_row


def publish(ladder: Ladder, rows: Sequence[TrialRow], *, reference: dict[str, Any] | str | None = None) -> None:
    """Print and store the results of a ladder; ``reference`` is a ladder to compare with, or the name of the study."""
    suite, folder, out = ladder.suite, ladder.folder, ladder.directory.parent
    controls, rungs = ladder.replay_results(rows)
    results = compare_rungs(controls, rungs, out)
    runs = [(rung, rung.row, rung.speed) for rung in results if rung.row and rung.speed]
    base, fastest = runs[0], max(runs, key=lambda run: run[2].middle)
    device = base[1].result.device if base[1].result else ladder.device
    control_rows = [control.row for control in controls if control.row]
    control_speeds = [row.speed.middle for row in control_rows if row.speed]
    record = {
        "name": ladder.directory.name, "device": device, "commit": provenance.find_commit(), "suite": suite.name,
        "controls": control_speeds, "rows": list(map(rung_json, results)),
    }  # fmt: skip
    write_json(folder / "rungs.json", record)
    best_config = trainable_config(fastest[0])
    write_json(folder / "best.json", best_json(ladder.directory.name, best_config, *fastest[1:]))
    sections = [
        results_table(suite, results),
        bullet_list(legend(suite, results, control_speeds)),
        *detail_tables(suite, results),
    ]
    if reference == study.NAME:
        sections += study.compare(suite, results)
    elif isinstance(reference, dict):
        sections.append(comparison(reference, record))
    record = partial(record_rung, tracking_uri=ladder.config.tracking_uri)
    profiles = profile_rungs(ladder.config.profile, results, folder / PROFILES, record)
    if profiles:
        sections += [*profile_tables(profiles), f"Traces: `{PROFILES}/*/trace.json.gz`, for ui.perfetto.dev"]
    conditions = describe_conditions(device, ladder.limit)
    cumulative = [base[2].middle * (rung.total.ratio if rung.total else 1.0) for rung, *_ in runs] * suite.cumulative
    figures = {
        "speed": charts.draw_rungs(
            f"{suite.title}: speed",
            conditions,
            [
                SpeedRow(rung.name, speed, row.memory or 0, "fastest" if rung is fastest[0] else "", rung is fastest[0])
                for rung, row, speed in runs
            ],
            cumulative,
        ),
        "loss": charts.draw_losses(
            f"{suite.title}: loss", conditions, [(rung.name, row) for rung, row, _ in runs], control_rows
        ),
    }
    if reference == study.NAME and (comparison_chart := study.draw(suite, results, conditions)):
        figures["study"] = comparison_chart
    if profiles and (timelines := draw_timelines(profiles, conditions)):
        figures["profiles"] = timelines
    # If no rung is faster than the baseline, the summary does not name the fastest one.
    gains = [(speed.middle, rung.total.ratio) for rung, _, speed in runs if rung.total]
    best, gain = max(gains, default=(None, None))
    details = [Fact.of("result/best_tokens_per_second", best), Fact.of("result/speedup_over_baseline", gain)]
    next_command = after_comparison(
        best_config, ladder.training.execution.device, ladder.manifest, fastest[2].middle,
        ladder.directory / "best.json",
    )  # fmt: skip
    summary = [*summary_fields(suite, results, device), ("Next", str(next_command))]
    report = Report(summary, sections, details)
    # A ladder whose baseline has no speed has ended with an error before.
    result = ExperimentResult(True, [*report.metrics().items()], ["rungs.json", "best.json"])
    ladder.publish(report, figures, result)


def rung_json(rung: RungResult) -> dict[str, Any]:
    """Convert a rung to its values in rungs.json."""
    values = {name: value for name, value in asdict(rung).items() if name not in ("row", "config")}
    values |= {"batch": rung.batch, "speed": rung.speed and rung.speed.middle, "ceiling": rung.ceiling}
    return (flatten_row(rung.row) if rung.row else {}) | values


def trainable_config(rung: RungResult) -> TrainConfig:
    """Return the config of a rung that has run, with the default length, cycle and checkpoints of a run."""
    defaults, config = TrainConfig(), rung.config
    assert config is not None, "a rung with a speed has run"
    length = {"steps": None, "time_budget": None} if source_of(config.dataset).has_epoch else {}
    return config.replace(
        speed_tolerance=None, cycle=defaults.duration.cycle, keep_checkpoints=defaults.checkpoints.keep_checkpoints,
        **length,
    )  # fmt: skip


def best_json(name: str, config: TrainConfig, row: TrialRow, speed: Estimate) -> dict[str, Any]:
    """Create best.json as for a search's winner: the ``config`` of the fastest rung, and its measurements."""
    assert row.result is not None, "a rung with a speed has a result"
    reference = SearchReference.of(name, speed, row.memory, [row.result])
    return {"config": config.to_json(), "measured": to_json(reference)}


def load_reference(text: str, out: str) -> dict[str, Any] | str:
    """Load the results of the earlier ladder with the name or folder ``text``, or return the name of the study."""
    if text == study.NAME:
        return text
    candidates = (StorageDir.of(out, text), StorageDir.of(text))
    directory = next((candidate for candidate in candidates if candidate.exists("rungs.json")), None)
    if directory is None:
        raise UserError(
            f"--compare {text}: no finished ladder found in {candidates[0]} or {candidates[1]}. Use the name or "
            "folder of a ladder that has finished."
        )
    content = directory.read("rungs.json")
    try:
        record = json.loads(content)
        speeds = [{"name": row["name"], "speed": row["speed"] and float(row["speed"])} for row in record["rows"]]
        return {"name": text, "device": record["device"], "commit": record["commit"], "rows": speeds}
    except (ValueError, KeyError, TypeError) as damage:
        file = directory / "rungs.json"
        raise UserError(f"--compare {text}: {file} is corrupt ({damage}). Run that ladder again.") from damage


def comparison(reference: dict[str, Any], ladder: dict[str, Any]) -> Table:
    """Build the table of the speeds of two ladders, whose rungs are matched by their names."""
    reference_speeds = {row["name"]: row["speed"] for row in reference["rows"]}
    rows = []
    for row in ladder["rows"]:
        speeds = reference_speeds.get(row["name"]), row["speed"]
        ratio = f"x{speeds[1] / speeds[0]:.2f}" if all(speeds) else "-"
        rows.append((row["name"], *(f"{speed:,.0f}" if speed else "-" for speed in speeds), ratio))
    columns = ("rung", f"tokens/s: {_ladder_label(reference)}", f"tokens/s: {_ladder_label(ladder)}", "speedup")
    return Table(f"Comparison with the ladder {reference['name']}", columns, rows)


def _ladder_label(ladder: dict[str, Any]) -> str:
    return f"{ladder['name']} ({', '.join(filter(None, (ladder['device'], ladder['commit'][:9])))})"
