"""What a person gets from a search: a line per trial while it runs, and at the end a report, charts and three files."""

import csv
import io
from collections.abc import Sequence
from itertools import chain
from typing import Any

from infra.console import console
from infra.errors import UserError
from infra.storage import write_json, write_text
from infra.table import Part, Report, listed
from infra.tracking.names import shown
from infra.tracking.saved_views import show_places
from infra.tracking.tracker import Tracker
from infra.units import GB, format_duration, format_size
from train.checkpoint.find import run_with
from train.estimate.card import Card, planned
from train.estimate.roofline import SOURCE, expected, reachable
from train.model_config import format_model
from train.resolve import choices, said
from tune import charts
from tune.compare import over
from tune.plan import Search
from tune.space import ACCUMULATION, Candidate, Combination, Space
from tune.strategy.nodes import scaled_to_first_node
from tune.strategy.ranking import UNFIT, Ranked, fit_to_win, rank
from tune.trial.row import OUTCOMES, TrialRow, flat_row, measured

FREE = (
    "A larger global batch is another training, not a faster way to the same one. Of each accumulation the fastest is "
    "marked; sizes end where memory does."
)
STAR = "a star marks a setting that changes the numerics, so that the loss may differ from the control's"
CONTROL = (
    "the control is the configuration that the flags describe; the column has the speed over the control's, in "
    "brackets where no difference from it has been shown"
)
TIE = "candidates that tie may be as fast as the winner"
CONFIRM = (
    "runs is 1 for a first measurement and, for the best and the control, the number of rounds in which they ran again "
    "(confirm), on which their speeds are based"
)
MEMORY_SOURCES = {
    "nvml": "the process's GPU memory by NVML",
    "device": "the growth of the GPU's memory by NVML, which hides processes here",
    "reserved": "the allocator's reserved memory, because NVML tells nothing here",
    "rss": "the process's peak resident memory, which stands in for GPU memory on the CPU "
    "(Python with torch and Ray alone is about half a gigabyte)",
}


SEARCH_METRICS = (
    "result/tokens_per_second", "result/speedup_over_control", "memory/process_gb", "trials/all",
    *(f"trials/{outcome}" for outcome in OUTCOMES), "time/device_seconds",
)  # fmt: skip
"""The same of a search's page."""


def publish(search: Search, rows: Sequence[TrialRow], tracker: Tracker) -> bool:
    """Write the finished search's files and charts, record them with its numbers, and print what was found.

    Returns whether there is a winner.
    """
    compared = scaled_to_first_node(rows)
    tracker.metrics(shown(summary_metrics(search, rows), SEARCH_METRICS))
    tracker.tags({"study": search.study})
    places = {
        candidate: " ".join([f"{number:02d}", *words])  # which sorts as text
        for number, (candidate, words) in enumerate(remarks(search.space, rank(compared)).items(), 1)
    }
    show_places(tracker.key, {row.key: places.get(row.candidate, "no place") for row in compared})
    told, figures = search_report(search, compared), charts.draw(compared, search.memory)
    search.publish(told, write_files(search, rows), figures, tracker)
    return bool(rank(compared))


def search_report(search: Search, rows: Sequence[TrialRow]) -> Report:
    """What a search has found, for the terminal, ``summary.md`` and its page in MLflow."""
    space = search.space
    sources = sorted({row.memory_source for row in rows if row.memory_source})
    notes = [f"memory is {MEMORY_SOURCES[source]}" for source in sources] + [CONTROL]
    notes += [STAR] * any("*" in space.label(row.candidate) for row in rows)
    notes += [TIE] * any(entry.tied for entry in rank(rows))
    notes += [CONFIRM] * any(row.stage == "confirm" for row in rows)
    found: list[str | Part] = [FREE] * space.free
    found += [Part("Tokens per second under the limit", headings(space), leaderboard(search, rows)), listed(notes)]
    if failed := failures(search, rows):
        found += ["Did not fit, or failed:", listed(failed)]
    if untried := never_run(search, rows):
        found += ["Never run:", listed(untried)]
    return Report(opening_lines(search, rows), found)


def headings(space: Space) -> tuple[str, ...]:
    """The headings of the leaderboard; ``control`` is the speed over the control's."""
    return ("micro-batch", *["global batch"] * space.free, "tokens/s", "95%", "control", "GB", "runs", "")


def leaderboard(search: Search, rows: Sequence[TrialRow]) -> list[tuple[str, ...]]:
    """The cells under :func:`headings` of every candidate that was tried, the winner first."""
    space, ranked = search.space, rank(rows)
    control = control_among(ranked, space)
    words = remarks(space, ranked)

    def named(candidate: Candidate) -> tuple[str, ...]:
        return (_below_heading(space, candidate), *[str(space.global_batch(candidate))] * space.free)

    lines = [
        (
            *named(entry.candidate), f"{entry.speed.middle:,.0f}", f"± {entry.speed.width / 2:.1%}",
            _over(entry, control), f"{entry.memory / GB:.2f}", str(entry.runs), ", ".join(words[entry.candidate]),
        )
        for entry in ranked
    ]  # fmt: skip
    for row in _unplaced(rows):
        speed = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-"
        memory = "-" if row.memory is None else f"{row.memory / GB:.2f}"
        lines.append((*named(row.candidate), speed, "", "", memory, "1", row.outcome))
    return lines


def _below_heading(space: Space, candidate: Candidate) -> str:
    """A candidate's name in a column whose heading is "micro-batch"."""
    return space.name(candidate).removeprefix("micro-batch ")


def _unplaced(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The last row of each candidate that is not ranked, in the order of the trials."""
    ranked = {entry.candidate for entry in rank(rows)}
    last = {row.candidate: row for row in rows if row.candidate not in ranked}
    return sorted(last.values(), key=lambda row: row.number)


def failures(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """A line for each reason for which candidates have no place."""
    reasons: dict[str, list[str]] = {}
    for row in _unplaced(rows):
        reasons.setdefault(f"{row.outcome}: {row.reason}", []).append(search.space.name(row.candidate))
    return [f"{'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def control_among(ranked: Sequence[Ranked], space: Space) -> Ranked | None:
    return next((entry for entry in ranked if entry.candidate == space.control), None)


def remarks(space: Space, ranked: Sequence[Ranked]) -> dict[Candidate, list[str]]:
    """What is to be said of each of the ``ranked`` candidates: winner, tie, control, fastest of its accumulation."""
    accumulations = [dict(entry.candidate.knobs).get(ACCUMULATION) for entry in ranked]
    return {
        entry.candidate: ["winner"] * (number == 0)
        + ["tie"] * entry.tied
        + ["control"] * (entry.candidate == space.control)
        + [f"best of x {own}"] * (own is not None and own not in accumulations[:number])
        for number, (entry, own) in enumerate(zip(ranked, accumulations, strict=True))
    }


def _over(entry: Ranked, control: Ranked | None) -> str:
    """``1.234 x`` the control's speed; ``(1.234 x)`` when that may be no difference, ``1.000 x`` for the control."""
    if control is None:
        return "-"
    difference = over(entry.speed, control.speed)
    text = f"{difference.ratio:.3f} x"
    return text if difference.different or entry is control else f"({text})"


def never_run(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """Candidates without a row, as sentences: one for each reason and choice of sizes."""
    seen, space = {row.candidate for row in rows}, search.space
    curves = search.memory.curves([row for row in rows if row.stage != "confirm"])
    sizes: dict[tuple[Combination, str], list[str]] = {}
    for candidate in space.candidates():
        if candidate not in seen:
            reason = search.memory.why_not(curves, candidate)
            sizes.setdefault((candidate.knobs, reason), []).append(str(candidate.micro_batch))
    labels: dict[tuple[str, str], list[str]] = {}
    for (knobs, reason), named in sizes.items():
        labels.setdefault((", ".join(named), reason), []).append(space.knobs_label(knobs))
    lines = []
    for (named, reason), which in labels.items():
        label = f"{len(which)} combinations of knobs" if len(which) > 1 else which[0]
        lines.append(f"micro-batch {named}{f' with {label}' * bool(label)}: {reason}")
    return lines


def limit_of(search: Search) -> str:
    """The limit as it was asked for, or what there is, whose bytes no larger unit divides."""
    return format_size(search.limit) if search.config.memory_limit else f"{search.limit / GB:.1f} GB (all there is)"


def no_winner(search: Search, rows: Sequence[TrialRow]) -> str:
    """Why a search has no winner."""
    under = f"under {limit_of(search)}"
    unfit = {row.candidate for row in rows if row.outcome in UNFIT}
    failed = [row for row in rows if row.outcome == "failed"]
    if any(row.candidate not in unfit for row in failed):
        others = f", and {len(unfit)} of the candidates do not fit {under}" if unfit else ""
        return f"no winner: {len(failed)} of {len(rows)} trials failed{others}"
    none = "nothing fits" if rows else "no trial was run, because nothing is predicted to fit"
    return f"{none} {under}: raise --memory-limit, or search more --knobs"


def best_json(search: Search, rows: Sequence[TrialRow]) -> dict[str, Any] | None:
    """The winner: its training config as ``config``, and what was measured; None when nothing fits."""
    ranked = rank(rows)
    if not ranked:
        return None
    best = ranked[0]
    return {
        "study": search.study,
        "config": search.space.config(best.candidate).to_json(),
        "measured": measured(best.speed, best.memory, fit_to_win(rows)[best.candidate])
        | {"runs": best.runs, "tied_with": [search.space.label(entry.candidate) for entry in ranked[1:] if entry.tied]},
    }


def csv_text(rows: Sequence[TrialRow]) -> str:
    text, flat = io.StringIO(), [flat_row(row) for row in rows]
    writer = csv.DictWriter(text, list(dict.fromkeys(chain(*flat))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def opening_lines(search: Search, rows: Sequence[TrialRow]) -> list[tuple[str, str]]:
    space, ranked = search.space, rank(rows)
    spent = format_duration(round(sum(row.seconds for row in rows)))
    what = f"the fastest way to {space.batch_label} under {limit_of(search)}"
    trials = f"{len(rows)} trials in {spent}"
    if not ranked:
        tried = f"{trials}, searcher {search.config.searcher}"
        return [("What", f"{what}: none was found"), ("Why", no_winner(search, rows)), ("Trials", tried)]
    best = ranked[0]
    control = control_among(ranked, space)
    tied = [space.name(entry.candidate) for entry in ranked[1:] if entry.tied]
    gain = "it is the control" if best is control else f"{_over(best, control)} the control's speed"
    return [
        ("What", f"{what}: {space.name(best.candidate)}; {trials}"),
        ("Tokens/s", str(best.speed)),
        ("Memory", f"{best.memory / GB:.2f} of {search.limit / GB:.2f} GB"),
        ("Gain", (f"{gain}; tied with {', '.join(tied)}" if tied else gain) if control else "the control has no speed"),
        ("Next", f"`{run_with(search.place / 'best.json')}`"),
    ]


def summary_metrics(search: Search, rows: Sequence[TrialRow]) -> dict[str, float | int | None]:
    """A finished search's numbers, by which searches compare in MLflow's list."""
    ranked = rank(scaled_to_first_node(rows))
    control = control_among(ranked, search.space)
    found: dict[str, float | int | None] = {}
    for best in ranked[:1]:
        found = {
            "result/tokens_per_second": best.speed.middle,
            "result/tokens_per_second_low": best.speed.low,
            "result/tokens_per_second_high": best.speed.high,
            "result/speedup_over_control": control and best.speed.middle / control.speed.middle,
            "memory/process_gb": best.memory / GB,
        }
    outcomes = {f"trials/{outcome}": sum(row.outcome == outcome for row in rows) for outcome in OUTCOMES}
    spent = sum(row.seconds for row in rows)
    return found | {"trials/all": len(rows)} | outcomes | {"time/device_seconds": spent}


def write_files(search: Search, rows: Sequence[TrialRow]) -> list[str]:
    """Write trials.csv, with ``rows`` as they were measured, and, if something fits, best.json; returns their names."""
    write_text(search.folder / "trials.csv", csv_text(rows))
    winner = best_json(search, scaled_to_first_node(rows))
    if winner is None:
        (search.folder / "best.json").unlink(missing_ok=True)
        return ["trials.csv"]
    write_json(search.folder / "best.json", winner)
    return ["trials.csv", "best.json"]


START_SECONDS = 10.0
"""A fresh process with torch, in Ray: 4 to 12 s where this was measured."""

COMPILE_SECONDS = {
    "off": 0.0, "blocks": 20.0, "whole": 40.0, "coordinate-descent": 100.0, "max-autotune": 150.0,
    "max-autotune-graphs": 150.0, "reduce-overhead": 40.0,
}  # fmt: skip
"""Roughly what a first step takes longer than the others, for GPT-2 124M on an idle machine with an empty cache."""


def introduce(search: Search) -> None:
    """Print what is searched, the training that the flags describe and, for a dry run, the plan."""
    config, control, asked = search.config, search.training, search.config.training
    where = f" of {', '.join(machine.name for machine in search.machines)}" if config.cluster or config.gpu else ""
    console.print(
        f"[bold]{format_model(asked.model)}[/bold]: {len(search.space.candidates())} candidates for "
        f"{search.space.batch_label}, limit {limit_of(search)} per process, on {search.device}{where}"
    )
    size = f"micro-batch {said('micro_batch', control, asked)} x {control.accumulation}"
    console.print(f"control: {size}, {choices(control, asked)}", markup=False)
    if config.dry_run:
        print_plan(search)


def print_plan(search: Search) -> None:
    """Print the control and its neighbours with the sizes that are predicted to fit, and what the search may cost."""
    space, config, curves = search.space, search.config, search.memory.curves([])
    control = space.control.knobs
    near = [control, *space.neighbours(control)]
    for knobs in near:
        sizes = space.sizes_of(knobs)
        fit = [size for size in sizes if curves.fits(Candidate(size, knobs))]
        name = space.knobs_label(knobs) or " ".join(["the control", *(f"{knob}={value}" for knob, value in control)])
        largest = f"; {curves.prior(Candidate(fit[-1], knobs)) / GB:.2f} GB at {fit[-1]}" if fit else ""
        console.print(f"{name}: {len(fit)} of {len(sizes)} sizes should fit: {', '.join(map(str, fit))}{largest}")
    if config.gpu:
        expectations(search, near, planned(config.gpu)).show()
    if further := len(space.combinations) - len(near):
        console.print(f"{further} further combinations differ from the control in more than one knob")
    trials = search.strategy.remaining([])
    compiling = max(COMPILE_SECONDS[space.config(Candidate(space.sizes_of(k)[0], k)).compile] for k in near)
    most = trials * (START_SECONDS + compiling + config.trial_time)
    counted = f", {format_duration(compiling)} per trial for compilation" if compiling else ""
    console.print(
        f"about {trials} trials of at most {config.trial_steps} steps or {format_duration(config.trial_time)} each, "
        f"at most {format_duration(round(most))} in all{counted}; nothing was run"
    )


def expectations(search: Search, near: Sequence[Combination], card: Card) -> Part:
    """The candidates with the knobs ``near`` that should fit ``card``, with memory and speed, the fastest first."""
    space, curves = search.space, search.memory.curves([])
    found: list[tuple[float, tuple[str, ...]]] = []
    for candidate in (Candidate(size, knobs) for knobs in near for size in space.sizes_of(knobs)):
        if not curves.fits(candidate):
            continue
        try:
            most = reachable(space.config(candidate), card)
        except UserError:  # of how it is executed
            most = 0.0
        speed = expected(most) if most else "-"
        found.append((most, (_below_heading(space, candidate), f"{curves.prior(candidate) / GB:.2f}", speed)))
    lines = [line for _, line in sorted(found, key=lambda row: -row[0])]
    title = f"Predicted for {card.facts.name}, not measured; tokens/s are {SOURCE}"
    return Part(title, ("micro-batch", "memory, GB", "tokens/s"), lines)
