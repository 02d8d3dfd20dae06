"""What a person gets from a search: a line a trial while it runs, and at the end a table and three files.

In: rows. Out: the terminal, and ``trials.csv``, ``best.json`` and ``summary.md`` in the search's folder.
"""

import csv
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from infra.command import console, escape
from infra.schema import to_json
from infra.storage import write_json, write_text
from infra.units import format_duration, format_size
from train.intervals import Estimate
from train.ladder.compare import over
from tune.config import SearchConfig
from tune.space import Candidate, Combination, Space
from tune.strategy.base import Strategy
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import UNFIT, Standing, standings
from tune.trial.row import Row

GB = 1e9
HEADINGS = ("", "candidate", "x", "tokens/s", "95%", "control", "GB", "runs", "")
FREE = (
    "The global batch was free here: candidates train with different batches, so that the winner is another training, "
    "not a faster way to the same one."
)
CONTROL = "control is the speed over the control's, in brackets where no difference from it has been shown"
MEMORY_SOURCES = {
    "nvml": "the process's GPU memory by NVML",
    "device": "the growth of the GPU's memory by NVML, which hides processes here",
    "reserved": "the allocator's reserved memory, because NVML tells nothing here",
    "rss": "the process's peak resident memory, which stands in for GPU memory on the CPU "
    "(Python with torch and Ray alone is about half a gigabyte)",
}


def row_text(row: Row, space: Space, limit: int) -> str:
    """A finished trial as one line."""
    speed = "no speed"
    if row.tokens_per_second and row.low and row.high:
        speed = f"{row.tokens_per_second:,.0f} ± {(row.high - row.low) / 2 / row.tokens_per_second:.1%} tok/s"
    memory = "-" if row.memory is None else f"{row.memory / GB:.2f} of {limit / GB:.2f} GB"
    parts = [f"{row.number:3d} {row.stage:7s} {space.label(row.candidate)} x {row.accumulation}", speed, memory]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.compile_seconds is not None:
        parts.append(f"compile {row.compile_seconds:.1f} s")
    parts.append(f"{row.outcome}: {row.reason}")
    return " | ".join(parts)


def progress_text(rows: Sequence[Row], space: Space, remaining: int) -> str:
    """The best so far, by the rounds of confirmations that are complete, what was spent, and the time left."""
    ranked = standings([row for row in rows if row.stage != "confirm" or row.round < rows[-1].round])
    best = f"{space.label(ranked[0].candidate)} {ranked[0].tokens_per_second:,.0f} tok/s" if ranked else "none yet"
    spent = sum(row.seconds for row in rows)
    left = spent / len(rows) * remaining if rows else 0.0
    return f"    best: {best} | spent {format_duration(round(spent))} | about {format_duration(round(left))} left"


def table(rows: Sequence[Row], space: Space) -> Table:
    """The leaderboard: every candidate that was tried, the winner first."""
    result = Table(title="tokens per second under the limit", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in HEADINGS:
        numeric = name in ("tokens/s", "95%", "control", "GB", "runs")
        result.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for values in leaderboard(rows, space):
        result.add_row(*(escape(value) for value in values))
    return result


def leaderboard(rows: Sequence[Row], space: Space) -> list[tuple[str, ...]]:
    """The leaderboard's cells under ``HEADINGS``: x is the accumulation, control the speed against the control's."""
    ranked = standings(rows)
    control = next((s for s in ranked if s.candidate == space.control), None)
    lines = []
    for place, standing in enumerate(ranked, 1):
        lines.append(
            (
                "=" if standing.tied else str(place),
                space.label(standing.candidate),
                str(space.config(standing.candidate).accumulation),
                f"{standing.tokens_per_second:,.0f}",
                f"± {(standing.high - standing.low) / 2 / standing.tokens_per_second:.1%}",
                _over(standing, control),
                f"{standing.memory / GB:.2f}",
                str(standing.runs),
                _remark(standing, place, space),
            )
        )
    named = {standing.candidate for standing in ranked}
    last = {row.candidate: row for row in rows if row.candidate not in named}
    for row in sorted(last.values(), key=lambda row: row.number):
        speed = f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "-"
        memory = "-" if row.memory is None else f"{row.memory / GB:.2f}"
        remark = f"{row.outcome}: {row.reason}"
        lines.append(("-", space.label(row.candidate), str(row.accumulation), speed, "", "", memory, "1", remark))
    return lines


def _over(standing: Standing, control: Standing | None) -> str:
    """``1.234 x`` the control's speed; ``(1.234 x)`` when that may be no difference, ``1.000 x`` for the control."""
    if control is None:
        return "-"
    difference = over(*(Estimate(s.tokens_per_second, s.low, s.high) for s in (standing, control)))
    text = f"{difference.ratio:.3f} x"
    return text if difference.different or standing is control else f"({text})"


def _remark(standing: Standing, place: int, space: Space) -> str:
    words = []
    if place == 1:
        words.append("winner")
    if standing.tied:
        words.append("tie")
    if standing.candidate == space.control:
        words.append("control")
    return ", ".join(words)


def never_run(rows: Sequence[Row], space: Space, memory: MemorySearcher) -> list[str]:
    """Candidates without a row, as sentences: one for each reason and choice of sizes."""
    seen = {row.candidate for row in rows}
    curves = memory.curves([row for row in rows if row.stage != "confirm"])
    sizes: dict[tuple[Combination, str], list[str]] = {}
    for candidate in space.candidates():
        if candidate not in seen:
            reason = memory.why_not(curves, candidate)
            sizes.setdefault((candidate.knobs, reason), []).append(f"m{candidate.micro_batch}")
    combinations: dict[tuple[str, str], list[Combination]] = {}
    for (knobs, reason), named in sizes.items():
        combinations.setdefault((", ".join(named), reason), []).append(knobs)
    return [f"{named}{_with(knobs, space)}: {reason}" for (named, reason), knobs in combinations.items()]


def _with(combinations: Sequence[Combination], space: Space) -> str:
    """`` with compile=off``; `` with 12 combinations of knobs``; nothing for the control's own."""
    if len(combinations) > 1:
        return f" with {len(combinations)} combinations of knobs"
    label = space.knobs_label(combinations[0])
    return f" with {label}" if label else ""


def no_winner(rows: Sequence[Row], space: Space, limit: float) -> list[str]:
    """Why a search has no winner: a sentence, and a line for each reason for which trials failed."""
    unfit = {row.candidate for row in rows if row.outcome in UNFIT}
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.outcome == "failed" and row.candidate not in unfit:
            labels = failed.setdefault(row.reason, [])
            labels.extend({space.label(row.candidate)} - set(labels))
    if not rows:
        said = f"no trial was run, because nothing is predicted to fit under {format_size(int(limit))}"
    elif not failed:
        said = f"nothing fits under {format_size(int(limit))}"
    else:
        count = sum(row.outcome == "failed" for row in rows)
        others = f", and {len(unfit)} of the candidates do not fit under {format_size(int(limit))}" if unfit else ""
        return [
            f"no winner: {count} of {len(rows)} trials failed{others}",
            *(f"{', '.join(labels)}: {reason}" for reason, labels in failed.items()),
        ]
    return [f"{said}: raise --memory-limit, or search more --knobs"]


def best_json(rows: Sequence[Row], space: Space) -> dict[str, Any] | None:
    """The winner: its training config as ``config``, and what was measured; None when nothing fits."""
    ranked = standings(rows)
    if not ranked:
        return None
    best = ranked[0]
    return {
        "study": "free global batch" if space.free else "fixed global batch",
        "config": space.config(best.candidate).to_json(),
        "measured": {
            "tokens_per_second": best.tokens_per_second,
            "low": best.low,
            "high": best.high,
            "memory_bytes": best.memory,
            "runs": best.runs,
            "tied_with": [space.label(s.candidate) for s in ranked[1:] if s.tied],
        },
    }


def csv_text(rows: Sequence[Row]) -> str:
    """All rows as CSV, a knob a column."""
    text = io.StringIO()
    flat = [flat_row(row) for row in rows]
    names = list(dict.fromkeys(name for values in flat for name in values))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def flat_row(row: Row) -> dict[str, Any]:
    """A row without nesting: the candidate's parts as columns, the single steps left out."""
    values = {k: v for k, v in to_json(row).items() if k not in ("candidate", "step_seconds")}
    return {"micro_batch": row.candidate.micro_batch} | dict(row.candidate.knobs) | values


def summary(rows: Sequence[Row], space: Space, memory: MemorySearcher, config: SearchConfig, folder: Path) -> str:
    """The search as Markdown: for ``summary.md`` and for the description in MLflow."""
    ranked = standings(rows)
    spent = format_duration(round(sum(row.seconds for row in rows)))
    limit = format_size(int(memory.limit))
    lines = [f"### The fastest way to {space.batch_label} under {limit}", ""]
    if space.free:
        lines += [FREE, ""]
    if ranked:
        best = ranked[0]
        lines.append(
            f"**{space.label(best.candidate)} x {space.config(best.candidate).accumulation}**: "
            f"{best.tokens_per_second:,.0f} tokens/s ({best.low:,.0f} to {best.high:,.0f}), {best.memory / GB:.2f} GB."
        )
    else:
        said, *reasons = no_winner(rows, space, memory.limit)
        lines += [f"**{said[0].upper()}{said[1:]}.**", *([""] if reasons else []), *(f"- {line}" for line in reasons)]
    lines += ["", f"{len(rows)} trials in {spent}, searcher {config.searcher}."]
    sources = {row.memory_source for row in rows if row.memory_source}
    lines += [f"Memory is {MEMORY_SOURCES[source]}." for source in sorted(sources)]
    lines += [f"{CONTROL.capitalize()}."]
    lines += ["", f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in leaderboard(rows, space)]
    untried = never_run(rows, space, memory)
    if untried:
        lines += ["", "Never run:", "", *(f"- {sentence}" for sentence in untried)]
    if ranked:
        lines += ["", f"`{train_command(folder)}`"]
    return "\n".join(lines) + "\n"


def train_command(folder: Path) -> str:
    """The line to paste."""
    return f"python -m train.run --config {shlex.quote(str(folder / 'best.json'))}"


def write_files(
    rows: Sequence[Row], space: Space, memory: MemorySearcher, config: SearchConfig, folder: Path
) -> list[Path]:
    """Write trials.csv, summary.md and, when something fits, best.json; returns their paths."""
    texts = {"trials.csv": csv_text(rows), "summary.md": summary(rows, space, memory, config, folder)}
    for name, text in texts.items():
        write_text(folder / name, text)
    best = best_json(rows, space)
    if best is None:
        (folder / "best.json").unlink(missing_ok=True)
        return [folder / name for name in texts]
    write_json(folder / "best.json", best)
    return [folder / name for name in (*texts, "best.json")]


def print_end(rows: Sequence[Row], space: Space, memory: MemorySearcher, folder: Path) -> None:
    """The closing table and what to do next."""
    console.print(table(rows, space))
    if space.free:
        console.print(FREE)
    for source in sorted({row.memory_source for row in rows if row.memory_source}):
        console.print(f"memory is {MEMORY_SOURCES[source]}")
    console.print(CONTROL)
    seen = {row.candidate for row in rows}
    untried = len([candidate for candidate in space.candidates() if candidate not in seen])
    if untried:
        console.print(f"never run: {untried} candidates; {folder / 'summary.md'} says of each why", markup=False)
    if standings(rows):
        console.print(f"train with it: {train_command(folder)}", markup=False)
    else:
        for line in no_winner(rows, space, memory.limit):
            console.print(line, markup=False)


START_SECONDS = 10.0
"""A fresh process with torch, in Ray: 4 to 12 s where this was measured."""

COMPILE_SECONDS = {"off": 0.0, "blocks": 20.0, "whole": 40.0, "max-autotune": 150.0, "reduce-overhead": 40.0}
"""Roughly what a first step takes longer than the others, for GPT-2 124M on an idle machine with an empty cache."""


def optuna_trials(space: Space) -> int:
    """Optuna's budget: a quarter of the grid, at least eight trials and at most fifty, some hours on a GPU."""
    return min(50, max(8, len(space.candidates()) // 4))


def print_plan(config: SearchConfig, space: Space, memory: MemorySearcher, strategy: Strategy) -> None:
    """Print the control and its neighbours with the sizes that are predicted to fit, and what the search may cost."""
    curves = memory.curves([])
    control = space.control.knobs
    near = [control, *space.neighbours(control)]
    for knobs in near:
        sizes = space.sizes_of(knobs)
        fit = [size for size in sizes if curves.fits(Candidate(size, knobs))]
        name = space.knobs_label(knobs) or " ".join(["the control", *(f"{knob}={value}" for knob, value in control)])
        largest = f"; {memory.prior(Candidate(fit[-1], knobs)) / 1e9:.2f} GB at {fit[-1]}" if fit else ""
        console.print(f"{name}: {len(fit)} of {len(sizes)} sizes should fit: {', '.join(map(str, fit))}{largest}")
    if further := len(space.combinations) - len(near):
        console.print(f"{further} further combinations differ from the control in more than one knob")
    trials = strategy.remaining([])
    compiling = max(COMPILE_SECONDS[space.config(Candidate(space.sizes_of(k)[0], k)).compile] for k in near)
    most = trials * (START_SECONDS + compiling + config.trial_time)
    counted = f", {format_duration(compiling)} a trial for compilation" if compiling else ""
    console.print(
        f"about {trials} trials of at most {config.trial_steps} steps or {format_duration(config.trial_time)} each, "
        f"at most {format_duration(round(most))} in all{counted}; nothing was run"
    )
