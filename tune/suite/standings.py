"""What a ladder found: each rung against the one before it and the baseline, with the uncertainty of both."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

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


def standings(controls: Sequence[Measured], rungs: Sequence[Measured], out: StorageDir) -> list[Measured]:
    """The baseline and the rungs, compared; ``out`` has what the doctor measured."""
    ran = [rung for rung in rungs if rung.speed]
    speeds = Interleaved([control.speed for control in controls if control.speed], [rung.speed for rung in ran])
    tokens = min(len(each.row.losses) * each.row.step_tokens for each in (controls[0], *ran) if each.row)
    found = []
    for rung in (controls[0], *rungs):
        if rung.row and rung.config and rung.speed:
            row, number = rung.row, sum(bool(before.row) for before in found) - 1
            total = speeds.over_control(number) if found else None
            rung = replace(
                rung, loss=loss_at(row, tokens), total=total,
                step=speeds.over_rung(number, number - 1) if number > 0 else total,
                matmul_rate=read_matmul_rate(out, row.device or "", rung.config.precision, row.node),
            )  # fmt: skip
        found.append(rung if rung.speed else Measured(rung.name, rung.reason))
    return found


def loss_at(trial: TrialRow, tokens: int) -> float | None:
    """Mean training loss over the last fifth of the first ``tokens`` tokens, which rungs of any batch share."""
    chosen = [loss for seen, loss in trial.curve if 0.8 * tokens < seen <= tokens]
    return statistics.fmean(chosen) if chosen else None


def closing(suite: Suite, rungs: Sequence[Measured]) -> Part:
    """The closing table; a rung without numbers has only its name."""
    took = f"s for {suite.steps_timed} steps" if suite.steps_timed > 1 else "s per step"
    kernels = {rung.row.attention for rung in rungs if rung.row}
    heading = ("rung", "batch", "tokens/s", "±", "step", "total", took, "GB", "predicted", "loss", "attention")
    lines = []
    for rung in rungs:
        name, row, speed = rung.name.removesuffix(SAME_BATCH), rung.row, rung.speed  # the batch tells them apart
        if row is None or speed is None:
            lines.append((name, *[""] * (len(heading) - 1)))
            continue
        predicted = f"{row.predicted_memory / GB:.2f}" if row.predicted_memory else "-"
        lines.append((
            name + "*" * rung.changes_numerics,
            rung.batch,
            f"{speed.middle:,.0f}",
            f"{max(speed.middle - speed.low, speed.high - speed.middle):,.0f}",
            times(rung.step) if suite.cumulative else "",
            times(rung.total),
            three_digits(suite.steps_timed * row.step_tokens / speed.middle),
            f"{(row.memory or 0) / GB:.2f}",
            predicted,
            f"{rung.loss:.3f}" if rung.loss is not None else "-",
            (row.attention or "") if len(kernels) > 1 else "",
        ))  # fmt: skip
    return filled(suite.title, heading, lines)


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


def legend(suite: Suite, rungs: Sequence[Measured], controls: Sequence[float]) -> list[str]:
    """Why rungs have no numbers, how the control drifted, what the table's signs mean, and the total gain."""
    lines = [f"{rung.name}: not run, {rung.reason}." for rung in rungs if rung.reason]
    lines.append(
        f"The control ran {len(controls)} times: {controls[0]:,.0f} tokens/s at first, {controls[-1]:,.0f} at the end, "
        f"between {min(controls):,.0f} and {max(controls):,.0f}."
    )
    notes = {
        "± is the wider half of the 95% interval. step is the speedup over the row before, total over the baseline, "
        "both relative to the runs of the baseline around each rung (the control); a ratio in brackets may be no "
        "difference at all. GB is the peak memory of the process, predicted what the formulas say of it, loss the "
        "training loss at equal tokens in nats per token. * marks a rung that changes the numerics, so that its loss "
        "may differ.": True,
        "The loss of one run does not judge a precision: with --steps, --seeds 3 compares held-out losses over three "
        "seeds.": suite.seeds == 1 and any("precision" in rung.changes for rung in suite.rungs),
        "A rung with a larger batch has two rows: first the change alone, at the batch of the rung before, then the "
        "larger batch as well.": any(rung.name.endswith(SAME_BATCH) for rung in rungs),
        "batch is the micro-batch, where several are accumulated with how many.": any(" x " in r.batch for r in rungs),
        "A batch in brackets was predicted to fit the memory limit and did not; a smaller one was run.": any(
            rung.too_large for rung in rungs
        ),
        "MFU is a fraction of the datasheet's peak at the rung's precision, HFU the same with the arithmetic that is "
        "done a second time, of ceiling a fraction of the matmul rate that infra.doctor measured here.": bool(
            utilisation(rungs).lines
        ),
    }
    lines += [note for note, applies in notes.items() if applies]
    measured = [(rung.name, rung.total) for rung in rungs if rung.total]
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
        lines.append(f"Total improvement over the baseline: {_sure(measured[-1][1])}.")
    return lines


def _sure(gain: Difference) -> str:
    interval = f"95%: {gain.low:.2f} to {gain.high:.2f}" + "; may be none" * (not gain.different)
    return f"{gain.ratio:.2f} times ({'unclear' if gain.unclear else interval})"


def helps(rungs: Sequence[Measured]) -> Part:
    """Memory and speed against the baseline: yes, no or (speed only) unclear, with the change in percent."""
    base, lines = rungs[0].memory, []
    for rung in rungs[1:]:
        if rung.memory is None or rung.total is None or not base:
            continue
        more = rung.memory / base - 1
        smaller = "yes" if more < -0.01 else "no"
        faster = "unclear" if rung.total.unclear else "yes" if rung.total.different and rung.total.ratio > 1 else "no"
        lines.append((rung.name, f"{smaller} ({more:+.1%})", f"{faster} ({rung.total.ratio - 1:+.1%})"))
    return Part("What helps", ("rung", "saves memory", "faster"), lines)


def equal_work(rungs: Sequence[Measured], *, cumulative: bool) -> Part:
    """A line for every rung that was run twice: batch, and the change of peak memory and speed, for each."""
    before, lines = rungs[0], []
    for rung, after in zip(rungs, [*rungs[1:], None], strict=True):
        if after and rung.name == after.name + SAME_BATCH:
            first = _gain(rung, before if cumulative else rungs[0], rung.step if cumulative else rung.total)
            lines.append((after.name, *first, *_gain(after, rung, after.step)))
        if rung.speed:
            before = rung
    title = "Each change at the batch before it, then with a larger one, each over the run before"
    return Part(title, ("rung", "batch", "memory", "speed", "batch", "memory", "speed"), lines)


def _gain(rung: Measured, before: Measured, step: Difference | None) -> tuple[str, ...]:
    if rung.memory is None:
        return ("not run", "", "")
    more = f"{rung.memory / before.memory - 1:+.0%}" if before.memory else ""
    return (rung.batch, more, times(step) if before.speed else "")


def held_out(suite: Suite, rungs: Sequence[Measured]) -> Part:
    """A line for every rung that was run with several seeds: its mean loss, and the change from the rung before.

    The change is the mean over the seeds, each of which gives both runs the same weights and the same batches, with
    Student's 95% interval.
    """
    lines = []
    for rung in rungs:
        changes = [after - before for before, after in rung.held_out]
        if len(changes) < 2:
            continue
        middle = statistics.fmean(changes)
        reach = t_quantile(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
        verdict = "no difference seen" if abs(middle) <= reach else "higher" if middle > 0 else "lower"
        mean = statistics.fmean(after for _, after in rung.held_out)
        lines.append((rung.name.removesuffix(SAME_BATCH), f"{mean:.4f}", f"{middle:+.4f} ±{reach:.4f}", verdict))
    compared = "the rung before" if suite.cumulative else "the baseline"
    title = f"Held-out loss over {suite.seeds} seeds, against {compared}"
    return Part(title, ("rung", "held-out loss", "change", "verdict"), lines)


def utilisation(rungs: Sequence[Measured]) -> Part:
    """A line for every rung: model TFLOP/s and what fraction of the hardware they are; none on unknown hardware."""
    ran = [(rung, rung.row) for rung in rungs if rung.row and rung.row.flops_per_second]
    lines = [
        (rung.name, f"{(row.flops_per_second or 0) / 1e12:,.3g}", *map(_percent, (row.mfu, row.hfu, rung.ceiling)))
        for rung, row in ran
        if any(row.mfu or rung.ceiling for rung, row in ran)
    ]
    return filled("Arithmetic", ("rung", "TFLOP/s", "MFU", "HFU", "of ceiling"), lines)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def filled(title: str, heading: Sequence[str], lines: Sequence[Sequence[str]]) -> Part:
    """A table without its empty columns, such as MFU on a CPU."""
    columns = [column for column in zip(heading, *lines, strict=True) if set(column[1:]) - {"", "-"}]
    heading, *lines = zip(*columns, strict=True) if columns else [heading]
    return Part(title, heading, lines)


def parts(suite: Suite, rungs: Sequence[Measured]) -> list[Part]:
    """The tables that follow the closing one, without empty ones."""
    twice, seeds = equal_work(rungs, cumulative=suite.cumulative), held_out(suite, rungs)
    tables = [*[helps(rungs)] * (not suite.cumulative), twice, seeds, utilisation(rungs)]
    return [part for part in tables if part.lines]


def opening_lines(suite: Suite, rungs: Sequence[Measured], device: str, best_file: StorageDir) -> list[tuple[str, str]]:
    ran = [(rung.speed, rung) for rung in rungs if rung.speed]
    (base_speed, base), (speed, best) = ran[0], max(ran, key=lambda each: each[0].middle)
    others = "" if best is base else f" with {best.name}, {base_speed.middle:,.0f} of the baseline"
    gain = f"{_sure(best.total)} over the baseline" if best.total else "no rung is faster than the baseline"
    return [
        ("What", f"{suite.title}; {len(ran) - 1} of {len(rungs) - 1} rungs ran on {device}"),
        ("Tokens/s", f"{speed}{others}"),
        ("Memory", f"{(best.memory or 0) / GB:.2f} GB, {(base.memory or 0) / GB:.2f} GB of the baseline"),
        ("Gain", gain),
        ("Next", f"`{run_with(best_file)}`"),
    ]
