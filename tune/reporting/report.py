"""The report of a search: what it prints before it starts, and the tables, charts and files at its end."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from infra.cli.console import console
from infra.cli.table import Report, Table, bullet_list
from infra.cli.units import GB, format_duration, format_size
from infra.errors import UserError
from infra.facts import Fact
from infra.schema import to_json
from infra.storage.files import write_json, write_text
from infra.tracking.names import group_under_detail
from train.estimate.gpu_rates import GpuRates, load_gpu_rates
from train.estimate.roofline import SOURCE, format_expected_range, roofline_speed
from train.reporting.report import memory_fact, speed_fact
from train.resolved import describe_execution, format_setting
from train.run_files.lookup import format_run_command
from train.search_reference import SearchReference
from tune.experiment.folder import ExperimentResult
from tune.experiment.search_plan import Search
from tune.reporting import charts
from tune.space import ACCUMULATION, Candidate, KnobValues, Space
from tune.strategy.nodes import normalize_speeds
from tune.strategy.ranking import DOES_NOT_FIT, Ranked, eligible_rows, rank
from tune.trial.compare import ratio_of
from tune.trial.row import OUTCOMES, TrialRow, flatten_row

ACCUMULATION_NOTE = (
    "A larger global batch changes the training itself. The fastest candidate of each accumulation is marked; "
    "micro-batches are searched up to the memory limit."
)
STAR_NOTE = "a star marks a setting that changes the numerics, so its loss may differ from the control's"
CONTROL_NOTE = (
    'the control is the configuration given by the flags; "speed vs control" is in brackets where the difference is '
    "not significant"
)
TIE_NOTE = "candidates marked as tie may be as fast as the winner"
CONFIRM_NOTE = (
    '"runs" is 1 for a first measurement and, for the best and the control, the number of confirmation rounds, on '
    "which their speeds are based"
)
MEMORY_SOURCES = {
    "nvml": "the process's GPU memory, measured by NVML",
    "device": "the growth of the GPU's memory, measured by NVML, which does not show processes on this machine",
    "reserved": "the memory reserved by torch's allocator, because NVML is not available on this machine",
    "rss": "the process's peak resident memory, which replaces GPU memory on a CPU (Python with torch and Ray needs "
    "about 0.5 GB of it)",
}


SEARCH_METRICS = (
    "result/tokens_per_second", "result/speedup_over_control", "memory/process_gb", "trials/all",
    *(f"trials/{outcome}" for outcome in OUTCOMES), "time/device_seconds",
)  # fmt: skip
"""Metrics at the top level of a search's page in MLflow; its other metrics are under ``detail/``."""


def publish(search: Search, rows: Sequence[TrialRow]) -> None:
    """Print the report of a finished search, and write its result, files and charts."""
    compared = normalize_speeds(rows)
    ranks = {
        candidate: " ".join([f"{number:02d}", *notes])  # MLflow sorts tags as text, so numbers have two digits
        for number, (candidate, notes) in enumerate(candidate_notes(search.space, rank(compared)).items(), 1)
    }
    report = search_report(search, rows)
    result = ExperimentResult(
        has_winner=bool(ranks), metrics=[*group_under_detail(report.metrics(), SEARCH_METRICS).items()],
        files=write_files(search, rows), tags={"space": search.space_label},
        ranks={row.key: ranks.get(row.candidate, "unranked") for row in compared},
    )  # fmt: skip
    search.publish(report, charts.draw(compared, search.memory), result)


def search_report(search: Search, rows: Sequence[TrialRow]) -> Report:
    """The results of a search, for the terminal, ``summary.md`` and MLflow."""
    space, ran = search.space, rows
    rows = normalize_speeds(ran)
    sources = sorted({row.result.memory.process_source for row in rows if row.result})
    notes = [f"memory is {MEMORY_SOURCES[source]}" for source in sources] + [CONTROL_NOTE]
    notes += [STAR_NOTE] * any("*" in space.short_label(row.candidate) for row in rows)
    notes += [TIE_NOTE] * any(entry.tied for entry in rank(rows))
    notes += [CONFIRM_NOTE] * any(row.stage == "confirm" for row in rows)
    sections: list[str | Table] = [ACCUMULATION_NOTE] * space.is_accumulation_searched
    sections += [Table("Candidates, fastest first", headings(space), leaderboard(search, rows)), bullet_list(notes)]
    if failed := failures(search, rows):
        sections += ["Unranked, because they failed or exceeded the memory limit:", bullet_list(failed)]
    if untried := untried_candidates(search, rows):
        sections += ["Not tried:", bullet_list(untried)]
    outcomes = [Fact.of(f"trials/{name}", sum(row.outcome == name for row in ran)) for name in OUTCOMES]
    return Report(summary_fields(search, rows, ran), sections, outcomes)


def headings(space: Space) -> tuple[str, ...]:
    """The headings of the leaderboard."""
    return (
        "micro-batch x accumulation", *["global batch (sequences)"] * space.is_accumulation_searched,
        "tokens/s", "95% CI",
        "speed vs control", "peak memory (GB)", "runs", "notes",
    )  # fmt: skip


def leaderboard(search: Search, rows: Sequence[TrialRow]) -> list[tuple[str, ...]]:
    """The cells below :func:`headings` for every candidate that was tried, the winner first."""
    space, ranked = search.space, rank(rows)
    control = control_among(ranked, space)
    notes = candidate_notes(space, ranked)

    def batch_cells(candidate: Candidate) -> tuple[str, ...]:
        return (
            _below_heading(space, candidate),
            *[str(space.global_batch(candidate))] * space.is_accumulation_searched,
        )

    lines = [
        (
            *batch_cells(entry.candidate), f"{entry.speed.middle:,.0f}", f"±{entry.speed.width / 2:.1%}",
            _format_speedup(entry, control), f"{entry.memory / GB:.2f}", str(entry.runs),
            ", ".join(notes[entry.candidate]),
        )
        for entry in ranked
    ]  # fmt: skip
    for row in _unranked(rows):
        speed = f"{row.tokens_per_second:,.0f}" if row.speed else "-"
        memory = "-" if row.memory is None else f"{row.memory / GB:.2f}"
        lines.append((*batch_cells(row.candidate), speed, "", "", memory, "1", row.outcome))
    return lines


def _below_heading(space: Space, candidate: Candidate) -> str:
    """A candidate's name in a column with the heading "micro-batch x accumulation"."""
    return space.long_label(candidate).removeprefix("micro-batch ")


def _unranked(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The last row of each candidate that is not ranked, in the order of the trials."""
    ranked = {entry.candidate for entry in rank(rows)}
    last = {row.candidate: row for row in rows if row.candidate not in ranked}
    return sorted(last.values(), key=lambda row: row.number)


def failures(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """A line for each reason why candidates are unranked."""
    reasons: dict[str, list[str]] = {}
    for row in _unranked(rows):
        reasons.setdefault(f"{row.outcome}: {row.reason}", []).append(search.space.long_label(row.candidate))
    return [f"{'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def control_among(ranked: Sequence[Ranked], space: Space) -> Ranked | None:
    return next((entry for entry in ranked if entry.candidate == space.control), None)


def candidate_notes(space: Space, ranked: Sequence[Ranked]) -> dict[Candidate, list[str]]:
    """Notes for each of the ``ranked`` candidates: winner, tie, control, fastest of its accumulation."""
    accumulations = [dict(entry.candidate.knobs).get(ACCUMULATION) for entry in ranked]
    return {
        entry.candidate: ["winner"] * (number == 0)
        + ["tie"] * entry.tied
        + ["control"] * (entry.candidate == space.control)
        + [f"fastest with x {accumulation}"] * (accumulation is not None and accumulation not in accumulations[:number])
        for number, (entry, accumulation) in enumerate(zip(ranked, accumulations, strict=True))
    }


def _format_speedup(entry: Ranked, control: Ranked | None) -> str:
    """``x1.23`` for the speed relative to the control's, in brackets where the difference is not significant."""
    if control is None:
        return "-"
    difference = ratio_of(entry.speed, control.speed)
    text = f"x{difference.ratio:.3f}"
    return text if difference.is_significant or entry is control else f"({text})"


def untried_candidates(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """A sentence for each set of candidates without a row that share the micro-batches and the reason."""
    tried, space = {row.candidate for row in rows}, search.space
    curves = search.memory.curves([row for row in rows if row.stage != "confirm"])
    sizes: dict[tuple[KnobValues, str], list[str]] = {}
    for candidate in space.candidates():
        if candidate not in tried:
            reason = search.memory.skip_reason(curves, candidate)
            sizes.setdefault((candidate.knobs, reason), []).append(str(candidate.micro_batch))
    labels: dict[tuple[str, str], list[str]] = {}
    for (knobs, reason), micro_batches in sizes.items():
        labels.setdefault((", ".join(micro_batches), reason), []).append(space.knobs_label(knobs))
    lines = []
    for (micro_batches, reason), knob_labels in labels.items():
        label = f"{len(knob_labels)} combinations of knobs" if len(knob_labels) > 1 else knob_labels[0]
        lines.append(f"micro-batch {micro_batches}{f' with {label}' * bool(label)}: {reason}")
    return lines


def limit_of(search: Search) -> str:
    """The memory limit as the flag has it, or in GB with one decimal where it is all available memory."""
    return format_size(search.limit) if search.config.memory_limit else f"{search.limit / GB:.1f} GB (all available)"


def no_winner(search: Search, rows: Sequence[TrialRow]) -> str:
    """The reason why a search has no winner."""
    limit = limit_of(search)
    unfit = {row.candidate for row in rows if row.outcome in DOES_NOT_FIT}
    failed = [row for row in rows if row.outcome == "failed"]
    if any(row.candidate not in unfit for row in failed):
        also_unfit = f", and {len(unfit)} candidates do not fit {limit}" if unfit else ""
        return f"{len(failed)} of {len(rows)} trials failed{also_unfit}"
    fact = "no configuration fits" if rows else "no trial ran, because no configuration is predicted to fit"
    return f"{fact} {limit}; raise --memory-limit or add --knobs that save memory"


def best_json(search: Search, rows: Sequence[TrialRow]) -> dict[str, Any] | None:
    """The winner: its training config as ``config``, and its measurements; None if no configuration fits."""
    ranked = rank(rows)
    if not ranked:
        return None
    best = ranked[0]
    results = [row.result for row in eligible_rows(rows)[best.candidate] if row.result]
    tied = [search.space.short_label(entry.candidate) for entry in ranked[1:] if entry.tied]
    reference = SearchReference.of(search.directory.name, best.speed, best.memory, results)
    reference = replace(reference, runs=best.runs, tied_with=tied)
    return {
        "space": search.space_label,
        "config": search.space.config(best.candidate).to_json(),
        "measured": to_json(reference),
    }


def csv_text(rows: Sequence[TrialRow]) -> str:
    text, flat = io.StringIO(), [flatten_row(row) for row in rows]
    writer = csv.DictWriter(text, list(dict.fromkeys(chain(*flat))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def summary_fields(search: Search, rows: Sequence[TrialRow], ran: Sequence[TrialRow]) -> list[tuple[str, str]]:
    """The first lines of a search's report, by name; ``rows`` are those of all that ``ran`` that are compared."""
    space, ranked = search.space, rank(rows)
    goal = f"fastest configuration for {space.batch_label} under {limit_of(search)}"
    seconds = sum(row.seconds for row in ran)
    trials = Fact.joined(
        Fact.of("trials/all", len(ran), "{} trials"),
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
    gain: str = "unknown, no control"
    if control:
        text = "none; the control is the fastest"
        if best is not control:
            text = f"{_format_speedup(best, control)} vs control"
        gain = Fact.of("result/speedup_over_control", best.speed.middle / control.speed.middle, text)
        gain = Fact.joined(gain, f"tied with {', '.join(tied)}" if tied else "")
    return [
        ("Search", Fact.joined(f"{goal}: {space.long_label(best.candidate)}", trials)),
        ("Tokens/s", speed_fact(best.speed)),
        ("Peak memory", memory_fact(best.memory, search.limit)),
        ("Speedup", gain),
        ("Next", f"`{format_run_command(search.directory / 'best.json')}`"),
    ]


def write_files(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """Write trials.csv with the ``rows`` as measured and, if there is a winner, best.json; returns their names."""
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
    "max-autotune-graphs": 150.0, "reduce-overhead": 40.0,
}  # fmt: skip
"""Typical extra time of the first step by ``--compile``, for GPT-2 124M on an idle machine with an empty cache."""


def introduce(search: Search) -> None:
    """Print what is searched, the control and, for a dry run, the plan."""
    config, control = search.config, search.training
    machines = f" of {', '.join(machine.name for machine in search.machines)}" if config.cluster or config.gpu else ""
    console.print(
        f"[bold]{config.training.model.text}[/bold]: {len(search.space.candidates())} candidates for "
        f"{search.space.batch_label}, limit {limit_of(search)} per process, on {search.device}{machines}"
    )
    batch = f"micro-batch {format_setting('micro_batch', control)} x {control.batch.accumulation}"
    console.print(f"control: {batch}, {describe_execution(control)}", markup=False)
    if config.dry_run:
        print_plan(search)


def print_plan(search: Search) -> None:
    """Print the control and its neighbors with the micro-batches that are predicted to fit, and the search's time."""
    space, config, curves = search.space, search.config, search.memory.curves([])
    control = space.control.knobs
    neighborhood = [control, *space.neighbours(control)]
    for knobs in neighborhood:
        sizes = space.micro_batches_for(knobs)
        fitting = [size for size in sizes if curves.fits(Candidate(size, knobs))]
        name = space.knobs_label(knobs) or " ".join(["control", *(f"{knob}={value}" for knob, value in control)])
        count = f"{len(fitting)} of {len(sizes)} micro-batches are predicted to fit"
        if fitting:
            memory = f"{curves.prior(Candidate(fitting[-1], knobs)) / GB:.2f} GB"
            count += f": {', '.join(map(str, fitting))} ({memory} at {fitting[-1]})"
        console.print(f"{name}: {count}")
    if config.gpu:
        predicted_speeds_table(search, neighborhood, load_gpu_rates(config.gpu)).show()
    if others := len(space.combinations) - len(neighborhood):
        console.print(f"{others} more combinations change several knobs at once")
    trials = search.strategy.remaining([])
    compiling = max(
        COMPILE_SECONDS[space.config(Candidate(space.micro_batches_for(k)[0], k)).execution.compile]
        for k in neighborhood
    )
    total = trials * (START_SECONDS + compiling + config.trial_time)
    compilation = f", including {format_duration(compiling)} per trial for compilation" if compiling else ""
    console.print(
        f"about {trials} trials of at most {config.trial_steps} steps or {format_duration(config.trial_time)} each, "
        f"at most {format_duration(round(total))} in total{compilation}"
    )
    console.print("dry run: nothing was run")


def predicted_speeds_table(search: Search, neighborhood: Sequence[KnobValues], gpu_rates: GpuRates) -> Table:
    """The candidates near the control that are predicted to fit ``gpu_rates``, with memory and speed, the fastest
    first."""
    space, curves = search.space, search.memory.curves([])
    speeds_and_lines: list[tuple[float, tuple[str, ...]]] = []
    for candidate in (Candidate(size, knobs) for knobs in neighborhood for size in space.micro_batches_for(knobs)):
        if not curves.fits(candidate):
            continue
        try:
            config = space.config(candidate)
            roofline = roofline_speed(config.model, config.batch, config.execution, gpu_rates)
        except UserError:  # the formulas do not cover how this candidate is executed
            roofline = 0.0
        speed = format_expected_range(roofline) if roofline else "-"
        line = (_below_heading(space, candidate), f"{curves.prior(candidate) / GB:.2f}", speed)
        speeds_and_lines.append((roofline, line))
    lines = [line for _, line in sorted(speeds_and_lines, key=lambda row: -row[0])]
    title = f"Predicted for {gpu_rates.device_info.name}, not measured; tokens/s are {SOURCE}"
    return Table(title, ("micro-batch x accumulation", "peak memory (GB)", "tokens/s"), lines)
