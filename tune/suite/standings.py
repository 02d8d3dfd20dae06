"""What a ladder found: each rung against the one before it and the baseline, with the uncertainty of both."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infra.storage_dir import StorageDir
from infra.table import Part
from infra.units import GB
from train.checkpoint.find import run_with
from train.estimate.flops import read_matmul_rate
from train.intervals import WIDEST_CONTROL, t_quantile
from tune.compare import Difference, Interleaved
from tune.suite.runs import SAME_BATCH, Measured
from tune.suite.suites import Suite
from tune.trial.row import TrialRow


@dataclass(frozen=True)
class Row:
    """One line of the closing table. ``reason`` says why there are no numbers."""

    name: str
    reason: str = ""
    batch: str = ""
    """Micro-batch, accumulation if any, and in brackets the batch that was predicted to fit and did not."""
    memory: int | None = None
    """Peak bytes of the process, and what the formulas say of it."""
    predicted_memory: int | None = None
    speed: float | None = None
    low: float | None = None
    high: float | None = None
    step_seconds: float | None = None
    """Of one optimizer step at that speed."""
    step: Difference | None = None
    """Over the rung before, each relative to the controls around it."""
    total: Difference | None = None
    """Over the baseline."""
    flops_per_second: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    """MFU with the arithmetic that is done a second time; None where nothing is recomputed."""
    ceiling: float | None = None
    """Fraction of the matmul rate that the doctor measured on this machine."""
    matmul_rate: float | None = None
    """That rate, in FLOP/s, at the rung's precision."""
    loss: float | None = None
    """Mean training loss over the last fifth of the tokens that every rung has seen."""
    attention: str = ""
    """The kernel of attention that ran; empty where all rungs ran the same."""
    changes_numerics: bool = False
    held_out: tuple[tuple[float, float], ...] = ()
    """Validation losses of the rung before and of this one, for each seed."""


def standings(controls: list[Measured], rungs: list[Measured], out: StorageDir) -> list[Row]:
    """The rows of the closing table; ``out`` has what the doctor measured."""
    ran = [rung for rung in rungs if rung.speed is not None]
    speeds = Interleaved([control.speed for control in controls if control.speed], [rung.speed for rung in ran])
    tokens = min(len(each.row.losses) * each.row.step_tokens for each in (controls[0], *ran) if each.row)
    rows = [_row(controls[0], out, tokens)]
    number = 0
    for rung in rungs:
        if rung.speed is None:
            rows.append(Row(rung.name, rung.reason))
            continue
        total = speeds.over_control(number)
        step = speeds.over_rung(number, number - 1) if number else total
        rows.append(_row(rung, out, tokens, step, total))
        number += 1
    if len({row.attention for row in rows if row.speed}) == 1:
        return [replace(row, attention="") for row in rows]
    return rows


def _row(
    measured: Measured, out: StorageDir, tokens: int, step: Difference | None = None, total: Difference | None = None
) -> Row:
    trial, config, speed = measured.row, measured.config, measured.speed
    assert trial is not None
    assert config is not None
    assert speed is not None
    rate = read_matmul_rate(out, trial.device or "", config.precision, trial.node)
    batch = str(config.micro_batch) + (f" x {config.accumulation}" if config.accumulation > 1 else "")
    return Row(
        name=measured.name,
        batch=batch + (f" ({measured.too_large[0]})" if measured.too_large else ""),
        memory=trial.memory,
        predicted_memory=round(trial.predicted_memory) if trial.predicted_memory else None,
        speed=speed.middle,
        low=speed.low,
        high=speed.high,
        step_seconds=trial.step_tokens / speed.middle,
        step=step,
        total=total,
        flops_per_second=trial.flops_per_second,
        mfu=trial.mfu,
        hfu=trial.hfu,
        ceiling=trial.flops_per_second / rate if trial.flops_per_second and rate else None,
        matmul_rate=rate,
        loss=loss_at(trial, tokens),
        attention=trial.attention or "",
        changes_numerics=measured.changes_numerics,
        held_out=measured.held_out,
    )


Curve = list[tuple[int, float]]
"""Tokens seen and training loss, in nats per token, after every step."""


def loss_curve(trial: TrialRow) -> Curve:
    """The curve of a trial."""
    return [(trial.step_tokens * step, loss) for step, loss in enumerate(trial.losses, 1)]


def loss_at(trial: TrialRow, tokens: int) -> float | None:
    """Mean training loss over the last fifth of the first ``tokens`` tokens, which rungs of any batch share."""
    chosen = [loss for seen, loss in loss_curve(trial) if 0.8 * tokens < seen <= tokens]
    return sum(chosen) / len(chosen) if chosen else None


def header(suite: Suite) -> tuple[str, ...]:
    """The headings of the closing table."""
    took = f"s for {suite.steps_timed} steps" if suite.steps_timed > 1 else "s per step"
    return ("rung", "batch", "tokens/s", "±", "step", "total", took, "GB", "predicted", "loss", "attention")


def cells(row: Row, suite: Suite) -> tuple[str, ...]:
    """A row as text, one cell per heading of :func:`header`; a rung without numbers has only its name."""
    name = row.name.removesuffix(SAME_BATCH)  # which the batch tells apart
    if row.speed is None or row.low is None or row.high is None or row.memory is None:
        return (name, *[""] * (len(header(suite)) - 1))
    return (
        name + "*" * row.changes_numerics,
        row.batch,
        f"{row.speed:,.0f}",
        f"{max(row.speed - row.low, row.high - row.speed):,.0f}",
        times(row.step) if suite.cumulative else "",
        times(row.total),
        three_digits(suite.steps_timed * row.step_seconds) if row.step_seconds else "-",
        f"{row.memory / GB:.2f}",
        f"{row.predicted_memory / GB:.2f}" if row.predicted_memory else "-",
        f"{row.loss:.3f}" if row.loss is not None else "-",
        row.attention,
    )


def three_digits(value: float) -> str:
    """``value`` with three significant digits, so that numbers of a column are equally precise."""
    return f"{value:#.3g}".rstrip(".")


def times(difference: Difference | None) -> str:
    """``1.23x ±4%``, or ``(1.23x)`` when the interval includes 1 or the control is unclear."""
    if difference is None:
        return ""
    if not difference.different:
        return f"({difference.ratio:.2f}x)"
    return f"{difference.ratio:.2f}x ±{difference.high / difference.ratio - 1:.0%}"


def legend(suite: Suite, rows: list[Row], controls: Sequence[float]) -> list[str]:
    """Why rungs have no numbers, how the control drifted, what the table's signs mean, and the total gain."""
    lines = [f"{row.name}: not run, {row.reason}." for row in rows if row.reason]
    lines.append(
        f"The control ran {len(controls)} times: {controls[0]:,.0f} tokens/s at first, {controls[-1]:,.0f} at the end, "
        f"between {min(controls):,.0f} and {max(controls):,.0f}."
    )
    lines.append(
        "± is the wider half of the 95% interval. step is the speedup over the row before, total over the baseline, "
        "both relative to the runs of the baseline around each rung (the control); a ratio in brackets may be no "
        "difference at all. GB is the peak memory of the process, predicted what the formulas say of it, loss the "
        "training loss at equal tokens in nats per token. * marks a rung that changes the numerics, so that its loss "
        "may differ."
    )
    if suite.seeds == 1 and any("precision" in rung.changes for rung in suite.rungs):
        lines.append(
            "The loss of one run does not judge a precision: with --steps, --seeds 3 compares held-out losses over "
            "three seeds."
        )
    if any(row.name.endswith(SAME_BATCH) for row in rows):
        lines.append(
            "A rung with a larger batch has two rows: first the change alone, at the batch of the rung before, then "
            "the larger batch as well."
        )
    if any(" x " in row.batch for row in rows):
        lines.append("batch is the micro-batch, where several are accumulated with how many.")
    if any("(" in row.batch for row in rows):
        lines.append("A batch in brackets was predicted to fit the memory limit and did not; a smaller one was run.")
    if any(row.mfu or row.ceiling for row in rows):
        lines.append(
            "MFU is a fraction of the datasheet's peak at the rung's precision, HFU the same with the arithmetic that "
            "is done a second time, of ceiling a fraction of the matmul rate that infra.doctor measured here."
        )
    measured = [(row.name, row.total) for row in rows if row.total]
    unclear = [(name, total.control_width) for name, total in measured if total.unclear]
    if unclear:
        lines.append(
            f"unclear: the control's 95% interval is up to {max(width for _, width in unclear):.0%} of its speed wide "
            f"around {'; '.join(name for name, _ in unclear)}, and above {WIDEST_CONTROL:.0%} no conclusion is drawn. "
            "More steps per rung (--steps or --time-budget) or a quieter machine would help."
        )
    if not any(rung.changes for rung in suite.rungs):
        alarms = sum(total.different for _, total in measured)
        lines.append(f"{alarms} of {len(measured)} equal runs were called different; expected are at most 5%.")
    if suite.cumulative and measured:
        total = measured[-1][1]
        lines.append(
            f"Total improvement over the baseline: {total.ratio:.2f} times (95%: {total.low:.2f} to {total.high:.2f})"
            + ("." if total.different else ", which may be none.")
        )
    return lines


HELPS = ("rung", "saves memory", "faster")
"""The headings of :func:`helps`."""


def helps(rows: list[Row]) -> list[tuple[str, str, str]]:
    """(rung, memory, speed) against the baseline: yes, no or (speed only) unclear, with the change in percent."""
    base, found = rows[0].memory, []
    for row in rows[1:]:
        if row.memory is None or row.total is None or not base:
            continue
        more = row.memory / base - 1
        smaller = "yes" if more < -0.01 else "no"
        faster = "unclear" if row.total.unclear else "yes" if row.total.different and row.total.ratio > 1 else "no"
        found.append((row.name, f"{smaller} ({more:+.1%})", f"{faster} ({row.total.ratio - 1:+.1%})"))
    return found


EQUAL_WORK = ("rung", "batch", "memory", "speed", "batch", "memory", "speed")
"""The headings of :func:`equal_work`."""
EQUAL_WORK_TITLE = "Each change at the batch before it, then with a larger one, each over the run before"


def equal_work(rows: list[Row], *, cumulative: bool) -> list[tuple[str, ...]]:
    """A line for every rung that was run twice: batch, and the change of peak memory and speed, for each."""
    lines: list[tuple[str, ...]] = []
    before, following = rows[0], [*rows[1:], None]
    for row, after in zip(rows, following, strict=True):
        if after and row.name == after.name + SAME_BATCH:
            first = _gain(row, before if cumulative else rows[0], row.step if cumulative else row.total)
            lines.append((after.name, *first, *_gain(after, row, after.step)))
        if row.speed:
            before = row
    return lines


def _gain(row: Row, before: Row, step: Difference | None) -> tuple[str, ...]:
    if row.memory is None:
        return ("not run", "", "")
    more = f"{row.memory / before.memory - 1:+.0%}" if before.memory else ""
    return (row.batch, more, times(step) if before.speed else "")


HELD_OUT = ("rung", "held-out loss", "change", "verdict")
"""The headings of :func:`held_out`."""


def held_out(rows: list[Row]) -> list[tuple[str, ...]]:
    """A line for every rung that was run with several seeds: its mean loss, and the change from the rung before.

    The change is the mean over the seeds, each of which gives both runs the same weights and the same batches, with
    Student's 95% interval.
    """
    lines: list[tuple[str, ...]] = []
    for row in rows:
        changes = [after - before for before, after in row.held_out]
        if len(changes) < 2:
            continue
        middle = statistics.fmean(changes)
        reach = t_quantile(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
        verdict = "no difference seen" if abs(middle) <= reach else "higher" if middle > 0 else "lower"
        mean = statistics.fmean(after for _, after in row.held_out)
        lines.append((row.name.removesuffix(SAME_BATCH), f"{mean:.4f}", f"{middle:+.4f} ±{reach:.4f}", verdict))
    return lines


UTILISATION = ("rung", "TFLOP/s", "MFU", "HFU", "of ceiling")
"""The headings of :func:`utilisation`."""


def utilisation(rows: list[Row]) -> list[tuple[str, ...]]:
    """A line for every rung: model TFLOP/s and what fraction of the hardware they are; none on unknown hardware."""
    if not any(row.mfu or row.ceiling for row in rows):
        return []
    return [
        (row.name, f"{row.flops_per_second / 1e12:,.3g}", *map(_percent, (row.mfu, row.hfu, row.ceiling)))
        for row in rows
        if row.flops_per_second
    ]


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def filled(title: str, heading: Sequence[str], lines: Sequence[Sequence[str]]) -> Part:
    """A table without its empty columns, such as MFU on a CPU."""
    columns = [column for column in zip(heading, *lines, strict=True) if set(column[1:]) - {"", "-"}]
    heading, *lines = zip(*columns, strict=True)
    return Part(title, heading, lines)


def closing(suite: Suite, rows: list[Row]) -> Part:
    """The closing table."""
    return filled(suite.title, header(suite), [cells(row, suite) for row in rows])


def parts(suite: Suite, rows: list[Row]) -> list[Part]:
    """The tables that follow the closing one, without empty ones."""
    compared = "the rung before" if suite.cumulative else "the baseline"
    shown = [
        Part("What helps", HELPS, [] if suite.cumulative else helps(rows)),
        Part(EQUAL_WORK_TITLE, EQUAL_WORK, equal_work(rows, cumulative=suite.cumulative)),
        Part(f"Held-out loss over {suite.seeds} seeds, against {compared}", HELD_OUT, held_out(rows)),
    ]
    if used := utilisation(rows):
        shown.append(filled("Arithmetic", UTILISATION, used))
    return [part for part in shown if part.lines]


def opening_lines(suite: Suite, rows: list[Row], device: str, best_file: StorageDir) -> list[tuple[str, str]]:
    """What somebody wants to know first of a ladder; ``best_file`` has the fastest rung's config."""
    ran = [row for row in rows if row.speed is not None and row.low is not None and row.high is not None]
    base, best = ran[0], max(ran, key=lambda row: row.speed or 0.0)
    speed = f"{best.speed:,.0f} (95%: {best.low:,.0f} to {best.high:,.0f})"
    if best is not base:
        speed += f" with {best.name}, {base.speed:,.0f} of the baseline"
    gain = best.total
    over = "no rung is faster than the baseline"
    if gain:
        over = f"{gain.ratio:.2f} times the baseline (95%: {gain.low:.2f} to {gain.high:.2f})"
        over += "" if gain.different else ", which may be none"
    return [
        ("What", f"{suite.title}; {len(ran) - 1} of {len(rows) - 1} rungs ran on {device}"),
        ("Tokens/s", speed),
        ("Memory", f"{(best.memory or 0) / GB:.2f} GB, {(base.memory or 0) / GB:.2f} GB of the baseline"),
        ("Gain", over),
        ("Next", f"`{run_with(best_file)}`"),
    ]
