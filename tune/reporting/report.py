"""The reports of a search: its introduction and plan, and the tables, charts and files of its results."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from infra.charts import describe_conditions
from infra.cli.console import console
from infra.cli.table import Report, Table, bullet_list
from infra.cli.units import GB, format_duration, format_size
from infra.facts import Fact
from infra.schema import to_json
from infra.storage.files import write_json, write_text
from infra.tracking.names import group_under_detail
from train.data.assumed import describe_data
from train.estimate.gpu_rates import GpuRates, load_gpu_rates
from train.estimate.prediction import Prediction, merge_batches, predict, prediction_table
from train.estimate.roofline import SOURCE
from train.intervals import Difference
from train.reporting.next_steps import after_comparison
from train.reporting.report import memory_fact, speed_fact
from train.search_reference import SearchReference
from tune.experiment.folder import ExperimentResult
from tune.experiment.search_plan import Search
from tune.reporting import charts
from tune.space import ACCUMULATION, Candidate, KnobValues, Space
from tune.strategy.nodes import normalize_speeds
from tune.strategy.ranking import DOES_NOT_FIT, Ranked, eligible_rows, rank
from tune.trial.compare import difference_fact
from tune.trial.row import OUTCOMES, TrialRow, flatten_row

ACCUMULATION_NOTE = (
    "A larger global batch changes the training itself. The fastest candidate of each accumulation is marked; "
    "micro-batches are searched up to the memory limit."
)
STAR_NOTE = "a star marks a setting that changes the numerics, so its loss may differ from the control's"
CONTROL_NOTE = (
    'the control is the configuration given by the flags; "speed vs control" is in brackets if the difference is not '
    "significant, which means that the two 95% intervals overlap"
)
TIE_NOTE = "candidates marked as tie may be as fast as the winner"
CONFIRM_NOTE = (
    '"runs" is the number of runs on which a speed is based: confirmation rounds of the best candidates and the '
    "control, 1 for all others"
)
MEMORY_SOURCES = {
    "nvml": "the process's GPU memory, measured by NVML",
    "device": "the increase of the GPU's used memory, because NVML does not report processes on this machine",
    "reserved": "the memory reserved by torch's allocator, because NVML is not available on this machine",
    "rss": "the process's peak resident set on the CPU (about 0.5 GB of it is Python with torch and Ray)",
}
"""Descriptions of the measurement of a process's memory, by its source in a result."""


SEARCH_METRICS = (
    "result/tokens_per_second", "result/speedup_over_control", "memory/process_gb", "trials/all",
    *(f"trials/{outcome}" for outcome in OUTCOMES), "time/device_seconds",
)  # fmt: skip
"""Metrics at the top level of a search's page in MLflow; its other metrics are under ``detail/``."""


def publish(search: Search, rows: Sequence[TrialRow]) -> None:
    """Print the report of a finished search, and write its result, files and charts."""
    normalized_rows = normalize_speeds(rows)
    tags = rank_tags(search.space, rank(normalized_rows))
    report = search_report(search, rows)
    result = ExperimentResult(
        has_winner=bool(tags), metrics=[*group_under_detail(report.metrics(), SEARCH_METRICS).items()],
        files=write_files(search, rows), tags={"space": search.space_label},
        trial_tags={row.key: tags.get(row.candidate, {"rank": "unranked"}) for row in normalized_rows},
    )  # fmt: skip
    device = next((row.result.device for row in rows if row.result), search.device)
    figures = charts.draw(normalized_rows, search.memory, describe_conditions(device, search.limit))
    search.publish(report, figures, result)


def search_report(search: Search, measured_rows: Sequence[TrialRow]) -> Report:
    """Build the report of a search for the terminal, ``summary.md`` and MLflow."""
    space, rows = search.space, normalize_speeds(measured_rows)
    sources = sorted({row.result.memory.process_source for row in rows if row.result})
    notes = [f"memory is {MEMORY_SOURCES[source]}" for source in sources] + [CONTROL_NOTE]
    notes += [STAR_NOTE] * any("*" in space.short_label(row.candidate) for row in rows)
    notes += [TIE_NOTE] * any(entry.tied for entry in rank(rows))
    notes += [CONFIRM_NOTE] * any(row.stage == "confirm" for row in rows)
    sections: list[str | Table] = [ACCUMULATION_NOTE] * space.is_accumulation_searched
    sections += [Table("Candidates, fastest first", headings(space), leaderboard(search, rows)), bullet_list(notes)]
    if texts := failures(search, rows):
        sections += ["Unranked, because they failed or exceeded the memory limit:", bullet_list(texts)]
    if texts := untried_candidates(search, rows):
        sections += ["Not tried:", bullet_list(texts)]
    outcomes = [Fact.of(f"trials/{name}", sum(row.outcome == name for row in measured_rows)) for name in OUTCOMES]
    return Report(summary_fields(search, rows, measured_rows), sections, outcomes)


def headings(space: Space) -> tuple[str, ...]:
    """Return the headings of the leaderboard."""
    return (
        "micro-batch x accumulation", *["global batch (sequences)"] * space.is_accumulation_searched,
        "tokens/s", "95% CI",
        "speed vs control", "peak memory (GB)", "runs", "notes",
    )  # fmt: skip


def leaderboard(search: Search, rows: Sequence[TrialRow]) -> list[tuple[str, ...]]:
    """Return the rows of the leaderboard: the ranked candidates, the winner first, then the unranked ones."""
    space, ranked = search.space, rank(rows)
    control = control_among(ranked, space)
    notes = candidate_notes(space, ranked)

    def batch_cells(candidate: Candidate) -> tuple[str, ...]:
        return (
            _batch_label(space, candidate),
            *[str(space.global_batch(candidate))] * space.is_accumulation_searched,
        )

    cells: list[tuple[str, ...]] = [
        (
            *batch_cells(entry.candidate), f"{entry.speed.middle:,.0f}", entry.speed.interval,
            _format_speedup(entry, control), f"{entry.memory / GB:.2f}", str(entry.runs),
            ", ".join(notes[entry.candidate]),
        )
        for entry in ranked
    ]  # fmt: skip
    for row in _unranked(rows):
        speed = (f"{row.speed.middle:,.0f}", row.speed.interval) if row.speed else ("-", "")
        memory = "-" if row.memory is None else f"{row.memory / GB:.2f}"
        cells.append((*batch_cells(row.candidate), *speed, "", memory, "1", row.outcome))
    return cells


def _batch_label(space: Space, candidate: Candidate) -> str:
    """Format the cell of a candidate in the column "micro-batch x accumulation"."""
    return space.long_label(candidate).removeprefix("micro-batch ")


def _unranked(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the last row of each candidate that is not ranked, in the order of trials."""
    ranked = {entry.candidate for entry in rank(rows)}
    last_rows = {row.candidate: row for row in rows if row.candidate not in ranked}
    return sorted(last_rows.values(), key=lambda row: row.number)


def failures(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """Format a text for each reason why candidates are unranked."""
    reasons: dict[str, list[str]] = {}
    for row in _unranked(rows):
        reasons.setdefault(f"{row.outcome}: {row.reason}", []).append(search.space.long_label(row.candidate))
    return [f"{'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def control_among(ranked: Sequence[Ranked], space: Space) -> Ranked | None:
    """Find the control among the ``ranked`` candidates; None if it is not ranked."""
    return next((entry for entry in ranked if entry.candidate == space.control), None)


def candidate_notes(space: Space, ranked: Sequence[Ranked]) -> dict[Candidate, list[str]]:
    """Return the notes for each of the ``ranked`` candidates: winner, tie, control, fastest of its accumulation."""
    accumulations = [dict(entry.candidate.knobs).get(ACCUMULATION) for entry in ranked]
    return {
        entry.candidate: ["winner"] * (number == 0)
        + ["tie"] * entry.tied
        + ["control"] * (entry.candidate == space.control)
        + [f"fastest with x {accumulation}"] * (accumulation is not None and accumulation not in accumulations[:number])
        for number, (entry, accumulation) in enumerate(zip(ranked, accumulations, strict=True))
    }


def rank_tags(space: Space, ranked: Sequence[Ranked]) -> dict[Candidate, dict[str, str]]:
    """Return the tags of the trials of each of the ``ranked`` candidates in MLflow: rank, and speed of the candidate.

    The tag ``tokens/s`` of a trial is its own speed, which differs if the candidate ran several times.
    """
    notes = candidate_notes(space, ranked)
    return {
        entry.candidate: {
            "rank": " ".join([f"{number:02d}", *notes[entry.candidate]]),  # MLflow sorts tags as text.
            "candidate_tokens/s": str(entry.speed),
        }
        for number, entry in enumerate(ranked, 1)
    }


def _format_speedup(entry: Ranked, control: Ranked | None) -> str:
    """Format the speed relative to the control's as ``x1.234``, in brackets if the difference is not significant."""
    if control is None or entry is control:
        return "-"
    return Difference.between(entry.speed, control.speed).ratio_text


def untried_candidates(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """Format a text for each group of untried candidates with the same micro-batches and the same reason."""
    tried_candidates, space = {row.candidate for row in rows}, search.space
    curves = search.memory.curves([row for row in rows if row.stage != "confirm"])
    sizes: dict[tuple[KnobValues, str], list[str]] = {}
    for candidate in space.candidates():
        if candidate not in tried_candidates:
            reason = search.memory.skip_reason(curves, candidate)
            sizes.setdefault((candidate.knobs, reason), []).append(str(candidate.micro_batch))
    labels: dict[tuple[str, str], list[str]] = {}
    for (knobs, reason), micro_batches in sizes.items():
        labels.setdefault((", ".join(micro_batches), reason), []).append(space.knobs_label(knobs))
    texts = []
    for (micro_batches, reason), knob_labels in labels.items():
        label = f"{len(knob_labels)} combinations of knobs" if len(knob_labels) > 1 else knob_labels[0]
        texts.append(f"micro-batch {micro_batches}{f' with {label}' * bool(label)}: {reason}")
    return texts


def format_limit(limit: int, requested: int | None) -> str:
    """Format the memory ``limit`` as in its flag, or in GB with one decimal if it is all available memory."""
    return format_size(limit) if requested else f"{limit / GB:.1f} GB (all available)"


def no_winner(search: Search, rows: Sequence[TrialRow]) -> str:
    """Return the reason why a search has no winner, as a part of a sentence."""
    limit = format_limit(search.limit, search.config.memory_limit)
    unfit = {row.candidate for row in rows if row.outcome in DOES_NOT_FIT}
    failed_rows = [row for row in rows if row.outcome == "failed"]
    if any(row.candidate not in unfit for row in failed_rows):
        also_unfit = f", and {len(unfit)} candidates do not fit {limit}" if unfit else ""
        return f"{len(failed_rows)} of {len(rows)} trials failed{also_unfit}"
    fact = "no configuration fits" if rows else "no trial ran, because no configuration is predicted to fit"
    return f"{fact} {limit}; increase --memory-limit or add --knobs that save memory"


def best_json(search: Search, rows: Sequence[TrialRow]) -> dict[str, Any] | None:
    """Create the content of best.json, with the config and the measurements of the winner; None without a winner."""
    ranked = rank(rows)
    if not ranked:
        return None
    best = ranked[0]
    results = [row.result for row in eligible_rows(rows)[best.candidate] if row.result]
    tied = [search.space.short_label(entry.candidate) for entry in ranked[1:] if entry.tied]
    reference = SearchReference.of(search.directory.name, best.speed, best.memory, results)
    config = search.space.config(best.candidate)
    reference = replace(reference, runs=best.runs, tied_with=tied).with_speeds(
        config, ((search.space.config(entry.candidate), entry.speed) for entry in ranked[1:])
    )
    return {
        "space": search.space_label,
        "config": config.to_json(),
        "measured": to_json(reference),
    }


def csv_text(rows: Sequence[TrialRow]) -> str:
    """Format the rows of all trials as CSV, with a column for each value of any row.

    The columns ``candidate_...`` have the speed of the trial's candidate, as in the leaderboard.
    """
    ranked = {entry.candidate: entry for entry in rank(normalize_speeds(rows))}
    return format_csv([flatten_row(row) | _candidate_columns(ranked.get(row.candidate)) for row in rows])


def format_csv(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format ``lines`` with values by column as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(chain(*lines))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _candidate_columns(entry: Ranked | None) -> dict[str, Any]:
    speed = entry and entry.speed
    return {
        "candidate_tokens_per_second": speed and speed.middle, "candidate_speed_low": speed and speed.low,
        "candidate_speed_high": speed and speed.high, "candidate_runs": entry and entry.runs,
    }  # fmt: skip


def summary_fields(
    search: Search, rows: Sequence[TrialRow], measured_rows: Sequence[TrialRow]
) -> list[tuple[str, str]]:
    """Return the first lines of a search's report: (name, text). ``rows`` have speeds normalized across machines."""
    space, ranked = search.space, rank(rows)
    goal = (
        f"fastest configuration for {space.batch_label} under {format_limit(search.limit, search.config.memory_limit)}"
    )
    seconds = sum(row.seconds for row in measured_rows)
    trials = Fact.joined(
        Fact.of("trials/all", len(measured_rows), "{} trials"),
        Fact.of("time/device_seconds", seconds, f"in {format_duration(round(seconds))}"),
        separator=" ",
    )
    if not ranked:
        return [
            ("Search", f"{goal}: none"), ("Reason", no_winner(search, rows)),
            ("Trials", Fact.joined(trials, f"searcher {search.config.searcher}", separator=", ")),
        ]  # fmt: skip
    best = ranked[0]
    control = control_among(ranked, space)
    tied = [space.long_label(entry.candidate) for entry in ranked[1:] if entry.tied]
    gain: str = "unknown, because the control has no speed"
    if control:
        difference = Difference.between(best.speed, control.speed)
        text = f"{difference.ratio_text} vs control" if best is not control else "none; the control is the fastest"
        gain = difference_fact("result/speedup_over_control", difference, text)
        gain = Fact.joined(gain, f"tied with {', '.join(tied)}" if tied else "")
    return [
        ("Search", Fact.joined(f"{goal}: {space.long_label(best.candidate)}", trials)),
        ("Tokens/s", speed_fact(best.speed)),
        ("Peak memory", memory_fact(best.memory, search.limit)),
        ("Speedup", gain),
        ("Next", str(after_comparison(
            space.config(best.candidate), search.training.execution.device, search.manifest, best.speed.middle,
            search.directory / "best.json",
        ))),
    ]  # fmt: skip


def write_files(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """Write trials.csv with the measured ``rows`` and, if there is a winner, best.json; return their names."""
    write_text(search.folder / "trials.csv", csv_text(rows))
    winner = best_json(search, normalize_speeds(rows))
    if winner is None:
        (search.folder / "best.json").unlink(missing_ok=True)
        return ["trials.csv"]
    write_json(search.folder / "best.json", winner)
    return ["trials.csv", "best.json"]


START_SECONDS = 10.0
"""Typical time in which Ray starts a process with torch: 4 to 12 s were measured."""

COMPILE_SECONDS = {
    "off": 0.0, "blocks": 20.0, "whole": 40.0, "coordinate-descent": 100.0, "max-autotune": 150.0,
    "max-autotune-graphs": 150.0, "reduce-overhead": 40.0, "eager": 5.0, "aot_eager": 10.0,
}  # fmt: skip
"""Typical extra time of the first step by ``--compile``, for GPT-2 124M on an idle machine with an empty cache."""


MAX_PLAN_ROWS = 8
"""Maximum number of rows in the table of candidates that a dry run prints."""


def introduce(search: Search) -> None:
    """Print the size of the search, its control and, for a dry run, the plan."""
    config, control = search.config, search.training
    machines = f" of {', '.join(machine.name for machine in search.machines)}" if config.cluster else ""
    limit, count = format_limit(search.limit, config.memory_limit), len(search.space.candidates())
    console.print(
        f"[bold]{config.training.model.text}[/bold]: {count} candidates for {search.space.batch_label}, limit {limit} "
        f"per process, on {search.device}{machines}"
    )
    batch = f"micro-batch {control.format_setting('micro_batch')} x {control.batch.accumulation}"
    console.print(f"control: {batch}, {control.describe_execution()}", markup=False)
    if config.dry_run:
        print_plan(search)


def print_plan(search: Search) -> None:
    """Print the candidates that are predicted to fit for the control and its neighbors, and the search's time."""
    config, space = search.config, search.space
    console.print(describe_data(search.manifest, search.training.model, config.training.dataset.source), markup=False)
    gpu_rates = load_gpu_rates(config.gpu) if config.gpu else None
    neighborhood = [space.control.knobs, *space.neighbors(space.control.knobs)]
    predictions, unpredicted = predict_candidates(search, neighborhood, gpu_rates)
    title = f"Candidates that are predicted to fit{f' {gpu_rates.device_info.name}' if gpu_rates else ''}, not measured"
    prediction_table(title, "knobs", predictions[:MAX_PLAN_ROWS]).show()
    notes = [SOURCE if gpu_rates else "speeds are only predicted with --gpu", *unpredicted]
    if hidden_count := len(predictions) - MAX_PLAN_ROWS:
        notes += [f"{hidden_count} more rows, which have smaller micro-batches or are slower"] * (hidden_count > 0)
    if distant_count := len(space.combinations) - len(neighborhood):
        notes.append(f"{distant_count} more combinations change several knobs at once")
    trials = search.strategy.remaining([])
    compiling = max(
        COMPILE_SECONDS[space.config(Candidate(space.micro_batches_for(k)[0], k)).execution.compile]
        for k in neighborhood
    )
    total = trials * (START_SECONDS + compiling + config.trial_time)
    compilation = f", including {format_duration(compiling)} per trial for compilation" if compiling else ""
    notes.append(
        f"about {trials} trials of at most {config.trial_steps} steps or {format_duration(config.trial_time)} each, "
        f"at most {format_duration(round(total))} in total{compilation}{format_cost(total, config.price)}"
    )
    console.print_paragraph(bullet_list(notes))
    console.print("dry run: nothing was run")


def format_cost(seconds: float, price_per_hour: float | None) -> str:
    """Format the maximum cost of a search or ladder, to follow its time; empty without a price."""
    return f", cost at most {seconds / 3600 * price_per_hour:,.2f}" if price_per_hour else ""


def predict_candidates(
    search: Search, combinations: Sequence[KnobValues], gpu_rates: GpuRates | None
) -> tuple[list[Prediction], list[str]]:
    """Predict the candidates of ``combinations`` that fit, of which the first is the control's.

    Candidates whose speeds differ by less than their error are one prediction. A knob's speed that equals the control's
    is not a prediction of the knob's effect.

    Returns: (predictions, those of the largest micro-batches and the fastest first; texts that name effects which are
    not predicted).
    """
    space, curves = search.space, search.memory.curves([])

    def predict_sizes(knobs: KnobValues) -> dict[int, Prediction]:
        label = space.knobs_label(knobs) or "control"
        sizes = [size for size in reversed(space.micro_batches_for(knobs)) if curves.fits(Candidate(size, knobs))]
        return {size: predict(label, space.config(Candidate(size, knobs)).step, gpu_rates) for size in sizes}

    control = predict_sizes(combinations[0])
    merged = [merge_batches(control.values())]
    values_by_effect: dict[str, dict[str, list[str]]] = {}
    for knobs in combinations[1:]:
        name, value = next(knob for knob in knobs if knob not in combinations[0])
        by_size = predict_sizes(knobs)
        pairs = [(by_size[size], control[size]) for size in by_size if size in control]
        effects = ["speed"] * (gpu_rates is not None and all(new.speed in (None, old.speed) for new, old in pairs))
        effects += ["memory"] * all(new.peak == old.peak for new, old in pairs)
        if name == ACCUMULATION:  # It changes the global batch, which the predictions cover.
            effects = []
        if effects:
            values_by_effect.setdefault(" and ".join(effects), {}).setdefault(name, []).append(str(value))
        if "speed" in effects:
            by_size = {size: replace(new, speed=None, common_speed=None) for size, new in by_size.items()}
        if "memory" not in effects or any(prediction.speed for prediction in by_size.values()):
            merged.append(merge_batches(by_size.values()))
    ranked = [(rank, prediction) for predictions in merged for rank, prediction in enumerate(predictions)]
    ranked.sort(key=lambda entry: (entry[0], -entry[1].speed.high if entry[1].speed else 0.0))
    return [prediction for _, prediction in ranked], [
        f"effect on {effect} not predicted: {' '.join(f'{name}=' + ','.join(texts) for name, texts in values.items())}"
        for effect, values in values_by_effect.items()
    ]
