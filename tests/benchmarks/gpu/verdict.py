"""What the rows of the GPU campaign show: the speeds beside the peers', and the goals.

This file needs nothing but Python.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card import Row, report_values
from schedule import GATES, best, gate_failure

GOALS: dict[str, float] = {"A100": 185_000, "H100": 500_000, "H200": 550_000}
"""Tokens per second of GPT-2 124M, by the card's name; other cards have no goal."""
SIDES = {
    "ours": "throughline", "nanogpt": "nanoGPT", "build-nanogpt": "build-nanogpt", "huggingface": "Hugging Face",
    "llm.c": "llm.c",
}  # fmt: skip
SHOWN_STEPS = 4
"""Steps that have not run and that a summary names."""
MAX_LOSS_DIFFERENCE = 0.03
"""Nats between two losses of the same step from the same weights, which bf16 explains; as in the five-minute test."""


@dataclass(frozen=True)
class Goal:
    """A measured value and what was wanted of it."""

    name: str
    value: float | None
    wanted: float | None
    """None for a card without a goal."""
    is_minimum: bool = True

    @property
    def line(self) -> str:
        """The goal in one line."""
        word = "-"
        if self.value is not None and self.wanted is not None:
            word = "reached" if (self.value >= self.wanted) is self.is_minimum else "MISSED"
        bound = (
            ""
            if self.wanted is None
            else f" (goal: {'at least' if self.is_minimum else 'at most'} {_short(self.wanted)})"
        )
        return f"{word:7} {self.name}: {_short(self.value)}{bound}"


def describe(row: Row) -> str:
    """What a row shows, in a line."""
    parts = [row["outcome"]]
    if speed := row.get("tokens_per_second"):
        parts.append(f"{speed:,.0f} tokens/s")
    if (process := row.get("process")) and row.get("predicted"):
        parts.append(f"{process / 1e9:.1f} GB (predicted {row['predicted'] / 1e9:.1f} GB)")
    elif peak := row.get("peak_bytes"):
        parts.append(f"{peak / 1e9:.1f} GB")
    if row["outcome"] in ("failed", "timeout"):
        text = (row.get("reason") or row.get("said") or "").strip()
        parts.append(text.splitlines()[-1][-200:] if text else "no message")
    return ", ".join(parts)


def goals(rows: list[Row]) -> list[Goal]:
    """The goals with what was reached so far."""
    by_step = {row["step"]: row for row in rows if row["outcome"] == "finished"}
    name = device(rows) or ""
    top = best(rows)
    speed = top["tokens_per_second"] if top else None
    rates = by_step.get("ceilings", {}).get("matmul") or by_step.get("gpu test", {}).get("report", {}).get("matmul", {})
    ladder = by_step.get("ladder", {}).get("found") or {}
    rungs = [row["speed"] for row in ladder.get("rows", ()) if row.get("speed") and not is_simulated(rows)]
    through_ray = ((by_step.get("run", {}).get("found") or {}).get("throughput") or {}).get("tokens_per_second")
    matmul = _over(top["flops_per_second"] if top else None, max(rates.values(), default=None))
    return [
        # nanoGPT's and our kernels, counted by bench-kernels, allow 1.04 in bf16 and 1.11 with bf16 activations.
        Goal("times nanoGPT", ratio(rows, "nanogpt"), 1.04),
        Goal("times build-nanogpt", ratio(rows, "build-nanogpt"), 1.0),
        Goal("times Hugging Face", ratio(rows, "huggingface"), 1.0),
        Goal("times llm.c", ratio(rows, "llm.c"), 1.0),
        Goal("losses beside nanoGPT's, nats", loss_difference(rows, "ours", "nanogpt"), MAX_LOSS_DIFFERENCE, False),
        Goal("tokens/s", speed, next((goal for card, goal in GOALS.items() if card in name), None)),
        Goal("of the measured matmul rate", matmul, 0.6),
        Goal("error of predicted memory", memory_error(rows), 0.03, False),
        Goal("data wait, of a step", top["data_wait_fraction"] if top else None, 0.001, False),
        Goal("last rung over the first", _over(rungs[-1], rungs[0]) if rungs else None, 12),
        Goal("cost of Ray and MLflow", 1 - through_ray / speed if through_ray and speed else None, 0.01, False),
    ]  # fmt: skip


def ratio(rows: list[Row], side: str) -> float | None:
    """How many times as fast ours is, by the medians of the last group of turns that both took.

    Before the turns, the five-minute test's ratio stands in for nanoGPT's.
    """
    group = common_group(rows, side)
    if group is None:
        report = next((row for row in rows if row["kind"] == "gpu test"), {})
        return report_values(report).get("nanogpt", {}).get("ratio") if side == "nanogpt" else None
    return _over(middle(rows, "ours", group), middle(rows, side, group))


def common_group(rows: list[Row], side: str) -> str | None:
    """The last group of turns in which ours and ``side`` have a speed."""
    groups = [row["group"] for row in rows if row["kind"] == f"peer {side}" and row.get("tokens_per_second")]
    return next((group for group in reversed(groups) if middle(rows, "ours", group)), None)


def middle(rows: list[Row], side: str, group: str) -> float | None:
    """The median speed of a side's turns in ``group``."""
    turns = turns_of(rows, side, group)
    return statistics.median(row["tokens_per_second"] for row in turns) if turns else None


def turns_of(rows: list[Row], side: str, group: str) -> list[Row]:
    """The turns of a side in ``group`` that have a speed."""
    return [
        row for row in rows
        if row["kind"] == f"peer {side}" and row.get("group") == group and row.get("tokens_per_second")
    ]  # fmt: skip


def memory_error(rows: list[Row]) -> float | None:
    """How far the predicted memory of a trainer's process was off at most, as it was predicted."""
    pairs = [
        (row["predicted"], row.get("process"))
        for row in rows
        if row["kind"] == "train" and row["outcome"] == "finished"
    ]
    values = [report_values(row).get("train", {}) for row in rows if row["kind"] == "gpu test"]
    pairs += [(value["predicted_bytes"], value.get("process_bytes")) for value in values if "predicted_bytes" in value]
    return max((abs(predicted / process - 1) for predicted, process in pairs if process), default=None)


def loss_difference(rows: list[Row], side: str, other: str) -> float | None:
    """The largest difference of two sides' losses in the same step; None before both have trained."""
    losses = {
        row["kind"]: row["losses"] for row in reversed(rows)
        if row["outcome"] == "finished" and row.get("losses") and row["group"] == "automatic"
    }  # fmt: skip
    first, second = losses.get(f"peer {side}"), losses.get(f"peer {other}")
    if first is None or second is None or is_simulated(rows):
        return None
    return max((abs(one - another) for one, another in zip(first, second, strict=False)), default=None)


def is_simulated(rows: list[Row]) -> bool:
    """Whether the GPU computes nothing."""
    return any(row.get("simulated") for row in rows)


def device(rows: list[Row]) -> str | None:
    """The name of the GPU."""
    return next((row["device"] for row in rows if row.get("device")), None)


def summary(rows: list[Row], missing: Sequence[str] = ()) -> list[str]:
    """What was measured so far, as lines for a reader who sees them for the first time."""
    seconds = sum(row["seconds"] for row in rows)
    name = device(rows) or "unknown GPU"
    finished = sum(row["outcome"] == "finished" for row in rows)
    lines = [f"{name}: {finished} of {len(rows)} steps finished in {seconds / 60:.0f} min"]
    if any(row.get("rehearsal") for row in rows):
        lines.append("This is a rehearsal with a small model: its numbers mean nothing.")
    if is_simulated(rows):
        lines.append("The GPU is simulated: it computes nothing, so there are no speeds and no losses.")
    if reason := gate_failure(rows):
        lines += ["Not passed: " + reason.strip()]
    reached = goals(rows)
    lines += ["", *_speed_lines(rows), "", *(goal.line for goal in reached if goal.value is not None)]
    unknown = [goal.name for goal in reached if goal.value is None]
    lines += [f"Not measured: {', '.join(unknown)}", ""] if unknown else [""]
    for row in rows:
        if row["outcome"] in ("failed", "timeout") and not _was_repeated(rows, row) and row["step"] not in GATES:
            lines.append(f"{row['step']}: {describe(row)}")
    names = [row["step"] for row in rows if row["outcome"] == "oom"]
    lines += [f"Out of memory, as an answer: {', '.join(names)}"] if names else []
    if missing:
        more = f" and {len(missing) - SHOWN_STEPS} more" if len(missing) > SHOWN_STEPS else ""
        lines += ["", f"Not run: {', '.join(missing[:SHOWN_STEPS])}{more}"]
    return lines


def _was_repeated(rows: list[Row], row: Row) -> bool:
    """Whether a later row of the same step replaces this one."""
    return next(later for later in reversed(rows) if later["step"] == row["step"]) is not row


def _speed_lines(rows: list[Row]) -> list[str]:
    """A table of the sides by groups of turns, and the fastest trainer."""
    groups = list(dict.fromkeys(row["group"] for row in rows if row.get("group")))
    table = []
    for group in groups:
        for side, title in SIDES.items():
            turns = turns_of(rows, side, group)
            if not turns:
                continue
            speeds = [row["tokens_per_second"] for row in turns]
            clock = _span([row["sm_clock"] for row in turns if row.get("sm_clock")])
            ratios = [
                ours["tokens_per_second"] / row["tokens_per_second"]
                for ours, row in zip(turns_of(rows, "ours", group), turns, strict=False)
            ]  # fmt: skip
            speed = statistics.median(speeds)
            times = f"x{statistics.median(ratios):.3f} ({_span(ratios, '.3f')})" if ratios and side != "ours" else ""
            settings = turns[-1]["settings"]
            text = f"micro-batch {settings['micro_batch']}"
            if side == "ours":
                text += f", {settings['precision']}, {settings['loss']} loss, compile {settings['compile']}"
            table.append((group, title, f"{speed:,.0f}", _span(speeds), str(len(turns)), times, clock, text))
    if not table:
        return ["No turns of throughline and nanoGPT have a speed yet."]
    heading = ("settings", "side", "tokens/s", "by turns", "turns", "throughline / side", "clock (MHz)", "how")
    widths = [max(len(row[column]) for row in (heading, *table)) for column in range(len(heading))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in (heading, *table)]  # fmt: skip
    top = best(rows)
    if top:
        lines.append(
            f"Fastest trainer: {top['tokens_per_second']:,.0f} tokens/s ({top['step'].removeprefix('train ')})"
        )
    return lines


def _span(values: Sequence[float], form: str = ",.0f") -> str:
    """The lowest and the highest value, or the only one."""
    ends = [format(end(values), form) for end in (min, max)] if values else ["-"]
    return " to ".join(dict.fromkeys(ends))


def record(bring: Path, rows: list[Row], records: Path, reports: Path) -> list[Path]:
    """Write what was copied back to ``bring`` as one record of all rows, and the GPU's report; returns their paths.

    A rehearsal's record has a name of its own, and so has a simulated GPU's.
    """
    name = device(rows)
    if name is None:
        sys.exit(f"{bring} has no rows of a GPU: copy there what the machine left in --out.")
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    kinds = (
        "rehearsal" if any(row.get("rehearsal") for row in rows) else "",
        "simulated" if is_simulated(rows) else "",
    )
    path = records / f"campaign-{'-'.join([*filter(None, kinds), slug])}.json"
    content: dict[str, Any] = {"device": name, "goals": {goal.name: [goal.value, goal.wanted] for goal in goals(rows)}}
    content |= {"summary": summary(rows), "rows": [without_folders(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    report = next((row["report"] for row in rows if row.get("report")), None)
    if not report or any(kinds):
        return [path]
    target = reports / f"{slug}.json"
    target.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [path, target]


def without_folders(row: Row) -> Row:
    """Return ``row`` with paths relative to the ``folders`` of the machine that it ran on."""
    text = json.dumps({name: value for name, value in row.items() if name != "folders"})
    for folder in row.get("folders", ()):
        text = text.replace(f"{json.dumps(folder)[1:-1]}/", "").replace(json.dumps(folder)[1:-1], ".")
    return json.loads(text)


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
