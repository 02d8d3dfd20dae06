"""The results of a ladder: each rung relative to the previous one and to the baseline, with confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from infra.cli.table import Table
from infra.cli.units import GB
from infra.facts import Fact
from infra.storage.directory import StorageDir
from train.estimate.flops import read_matmul_rate
from train.intervals import MAX_CONTROL_WIDTH, t_quantile
from train.run_files.lookup import format_run_command
from tune.suite.runs import SAME_BATCH, RungResult
from tune.suite.suites import Suite
from tune.trial.compare import Difference, InterleavedRuns
from tune.trial.row import TrialRow


def compare_rungs(controls: Sequence[RungResult], rungs: Sequence[RungResult], out: StorageDir) -> list[RungResult]:
    """The baseline and the rungs with their comparisons; ``out`` is the folder with the doctor's measurements."""
    ran = [rung for rung in rungs if rung.speed]
    speeds = InterleavedRuns([control.speed for control in controls if control.speed], [rung.speed for rung in ran])
    tokens = min(len(each.row.losses) * each.row.step_tokens for each in (controls[0], *ran) if each.row)
    results = []
    for rung in (controls[0], *rungs):
        if rung.row and rung.config and rung.speed:
            row, number = rung.row, sum(bool(result.row) for result in results) - 1
            device = row.result.device if row.result else ""
            total = speeds.over_control(number) if results else None
            rung = replace(
                rung, loss=loss_at(row, tokens), total=total,
                step=speeds.over_rung(number, number - 1) if number > 0 else total,
                matmul_rate=read_matmul_rate(out, device, rung.config.execution.precision, row.node),
            )  # fmt: skip
        results.append(rung if rung.speed else RungResult(rung.name, rung.reason))
    return results


def loss_at(trial: TrialRow, tokens: int) -> float | None:
    """Mean training loss over the last fifth of the first ``tokens`` tokens, which rungs of any batch have seen."""
    losses = [loss for seen, loss in trial.curve if 0.8 * tokens < seen <= tokens]
    return statistics.fmean(losses) if losses else None


def results_table(suite: Suite, rungs: Sequence[RungResult]) -> Table:
    """The table of all rungs; a rung that was skipped has only its name."""
    step_time = f"s/{suite.steps_timed} steps" if suite.steps_timed > 1 else "s/step"
    kernels = {rung.row.result.attention for rung in rungs if rung.row and rung.row.result}
    heading = (
        "rung", "batch (sequences)", "tokens/s", "± tokens/s", "vs previous", "vs baseline", step_time,
        "peak memory (GB)", "predicted (GB)", "loss (nats/token)", "attention kernel",
    )  # fmt: skip
    lines = []
    for rung in rungs:
        name, row, speed = rung.name.removesuffix(SAME_BATCH), rung.row, rung.speed  # Their batches differ.
        if row is None or speed is None:
            lines.append((name, *[""] * (len(heading) - 1)))
            continue
        predicted = f"{row.predicted_memory / GB:.2f}" if row.predicted_memory else "-"
        lines.append((
            name + "*" * rung.changes_numerics,
            rung.batch,
            f"{speed.middle:,.0f}",
            f"{max(speed.middle - speed.low, speed.high - speed.middle):,.0f}",
            format_ratio(rung.step) if suite.cumulative else "",
            format_ratio(rung.total),
            three_digits(suite.steps_timed * row.step_tokens / speed.middle),
            f"{(row.memory or 0) / GB:.2f}",
            predicted,
            f"{rung.loss:.3f}" if rung.loss is not None else "-",
            row.result.attention if row.result and len(kernels) > 1 else "",
        ))  # fmt: skip
    return without_empty_columns(suite.title, heading, lines)


def three_digits(value: float) -> str:
    """``value`` with three significant digits, so that all numbers of a column are equally precise."""
    return f"{value:#.3g}".rstrip(".")


def format_ratio(difference: Difference | None) -> str:
    """``x1.23 ±4%``, or ``(x1.23)`` if the difference is not significant or inconclusive."""
    if difference is None:
        return ""
    if not difference.is_significant:
        return f"(x{difference.ratio:.2f})"
    return f"x{difference.ratio:.2f} ±{difference.high / difference.ratio - 1:.0%}"


def legend(suite: Suite, rungs: Sequence[RungResult], controls: Sequence[float]) -> list[str]:
    """Reasons why rungs were skipped, the drift of the control, the meaning of the columns, and the total speedup."""
    lines = [f"{rung.name}: skipped; {rung.reason}." for rung in rungs if rung.reason]
    lines.append(
        f"The control ran {len(controls)} times: {controls[0]:,.0f} tokens/s first, {controls[-1]:,.0f} tokens/s last, "
        f"range {min(controls):,.0f} to {max(controls):,.0f}."
    )
    notes = {
        '"± tokens/s" is the wider half of the 95% confidence interval.': True,
        '"vs previous" is the speedup over the row above, "vs baseline" over the baseline. Both are relative to the '
        "runs of the baseline around each rung (the control); a ratio in brackets is not significant.": True,
        '"predicted" is the peak memory by formulas. "loss" is the training loss after equal tokens.': True,
        "* marks a rung that changes the numerics, so its loss may differ.": any(r.changes_numerics for r in rungs),
        "One run cannot compare the losses of two precisions. To compare validation losses over three seeds, use "
        "--steps with --seeds 3.": suite.seeds == 1 and any("precision" in rung.changes for rung in suite.rungs),
        "A rung with a larger batch has two rows: first the change alone at the batch of the previous rung, then with "
        "the larger batch.": any(rung.name.endswith(SAME_BATCH) for rung in rungs),
        '"batch" is micro-batch x accumulation.': any(" x " in rung.batch for rung in rungs),
        "A batch in brackets was predicted to fit the memory limit and did not; a smaller one was run.": any(
            rung.failed_micro_batches for rung in rungs
        ),
        "MFU is the fraction of the datasheet's peak FLOP/s at the rung's precision, HFU the same including "
        "recomputation. The matmul ceiling is the rate that infra.doctor measured on this machine.": bool(
            utilization_table(rungs).rows
        ),
    }
    lines += [note for note, applies in notes.items() if applies]
    totals = [(rung.name, rung.total) for rung in rungs if rung.total]
    inconclusive = [(name, total.control_width) for name, total in totals if total.is_inconclusive]
    if inconclusive:
        lines.append(
            f"Inconclusive: around {'; '.join(name for name, _ in inconclusive)} the control's 95% interval is up to "
            f"{max(width for _, width in inconclusive):.0%} of its speed wide; above {MAX_CONTROL_WIDTH:.0%} no "
            "conclusion is drawn. Use more steps per rung (--steps or --time-budget) or a quieter machine."
        )
    if not any(rung.changes for rung in suite.rungs):
        alarms = sum(total.is_significant for _, total in totals)
        lines.append(f"{alarms} of {len(totals)} identical runs were judged different; at most 5% are expected.")
    if suite.cumulative and totals:
        lines.append(f"Total speedup over the baseline: {_format_gain(totals[-1][1])}.")
    return lines


def _format_gain(gain: Difference) -> str:
    interval = f"95% CI x{gain.low:.2f} to x{gain.high:.2f}" + "; not significant" * (not gain.is_significant)
    return f"x{gain.ratio:.2f} ({'inconclusive' if gain.is_inconclusive else interval})"


def effects_table(rungs: Sequence[RungResult]) -> Table:
    """Changes of memory and speed relative to the baseline, with a verdict: yes, no or (speed only) inconclusive."""
    base, lines = rungs[0].memory, []
    for rung in rungs[1:]:
        if rung.memory is None or rung.total is None or not base:
            continue
        growth = rung.memory / base - 1
        smaller = "yes" if growth < -0.01 else "no"
        significant = rung.total.is_significant and rung.total.ratio > 1
        faster = "inconclusive" if rung.total.is_inconclusive else "yes" if significant else "no"
        lines.append((rung.name, f"{smaller} ({growth:+.1%})", f"{faster} ({rung.total.ratio - 1:+.1%})"))
    return Table("Effect vs baseline", ("rung", "saves memory", "is faster"), lines)


def equal_work_table(rungs: Sequence[RungResult], *, cumulative: bool) -> Table:
    """A line for each rung that ran twice: its two batches, and the changes of peak memory and speed at each."""
    previous, lines = rungs[0], []
    for rung, following in zip(rungs, [*rungs[1:], None], strict=True):
        if following and rung.name == following.name + SAME_BATCH:
            change = _gain(rung, previous if cumulative else rungs[0], rung.step if cumulative else rung.total)
            lines.append((following.name, *change, *_gain(following, rung, following.step)))
        if rung.speed:
            previous = rung
    reference = "the previous rung" if cumulative else "the baseline"
    title = f"Each change at the batch of {reference}, then with its larger batch"
    columns = (
        "rung", "batch (sequences)", f"memory vs {reference.split()[-1]}", f"speed vs {reference.split()[-1]}",
        "larger batch (sequences)", "memory vs same batch", "speed vs same batch",
    )  # fmt: skip
    return Table(title, columns, lines)


def _gain(rung: RungResult, reference: RungResult, step: Difference | None) -> tuple[str, ...]:
    """Batch, change of memory, and speedup of a rung relative to the ``reference``, as cells."""
    if rung.memory is None:
        return ("not run", "", "")
    growth = f"{rung.memory / reference.memory - 1:+.0%}" if reference.memory else ""
    return (rung.batch, growth, format_ratio(step) if reference.speed else "")


def held_out_table(suite: Suite, rungs: Sequence[RungResult]) -> Table:
    """A line for each rung that ran with several seeds: its mean validation loss, and the change it makes.

    The change is the mean over the seeds with Student's 95% interval. A seed gives both runs the same weights and the
    same batches.
    """
    lines = []
    for rung in rungs:
        changes = [loss - previous for previous, loss in rung.held_out]
        if len(changes) < 2:
            continue
        middle = statistics.fmean(changes)
        half_width = t_quantile(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
        verdict = "not significant" if abs(middle) <= half_width else "higher" if middle > 0 else "lower"
        mean = statistics.fmean(loss for _, loss in rung.held_out)
        lines.append((rung.name.removesuffix(SAME_BATCH), f"{mean:.4f}", f"{middle:+.4f} ±{half_width:.4f}", verdict))
    reference = "previous rung" if suite.cumulative else "baseline"
    title = f"Validation loss over {suite.seeds} seeds"
    return Table(title, ("rung", "validation loss (nats/token)", f"change vs {reference} (95% CI)", "verdict"), lines)


def utilization_table(rungs: Sequence[RungResult]) -> Table:
    """A line for each rung: model TFLOP/s and the fraction of the hardware's; empty if the hardware is unknown."""
    ran = [(rung, rung.row.result) for rung in rungs if rung.row and rung.row.result]
    ran = [(rung, result, result.flops_per_second) for rung, result in ran if result.flops_per_second]
    lines = [
        (rung.name, f"{flops / 1e12:,.3g}", *map(_percent, (result.mfu, result.hfu, rung.ceiling)))
        for rung, result, flops in ran
        if any(result.mfu or rung.ceiling for rung, result, _ in ran)
    ]
    return without_empty_columns("Utilization", ("rung", "model TFLOP/s", "MFU", "HFU", "% of matmul ceiling"), lines)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def without_empty_columns(title: str, heading: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table without its empty columns; MFU is unknown on a CPU, for example."""
    columns = [column for column in zip(heading, *lines, strict=True) if set(column[1:]) - {"", "-"}]
    heading, *lines = zip(*columns, strict=True) if columns else [heading]
    return Table(title, heading, lines)


def detail_tables(suite: Suite, rungs: Sequence[RungResult]) -> list[Table]:
    """The tables below the results, without empty ones."""
    batches, losses = equal_work_table(rungs, cumulative=suite.cumulative), held_out_table(suite, rungs)
    tables = [*[effects_table(rungs)] * (not suite.cumulative), batches, losses, utilization_table(rungs)]
    return [part for part in tables if part.rows]


def summary_fields(
    suite: Suite, rungs: Sequence[RungResult], device: str, best_file: StorageDir
) -> list[tuple[str, str]]:
    """The first lines of a ladder's report, by name."""
    ran = [(rung.speed, rung) for rung in rungs if rung.speed]
    (base_speed, base), (speed, best) = ran[0], max(ran, key=lambda each: each[0].middle)
    memory, gain = f"{(best.memory or 0) / GB:.2f} GB", "none; no rung is faster than the baseline"
    speeds = Fact.of("result/baseline_tokens_per_second", base_speed.middle, str(speed))
    if best is not base:
        speeds = Fact.joined(
            Fact.joined(best.name, Fact.of("result/best_tokens_per_second", speed.middle, str(speed)), separator=" "),
            Fact.of("result/baseline_tokens_per_second", base_speed.middle, "baseline {:,.0f}"),
        )
        memory = f"{best.name} {memory}; baseline {(base.memory or 0) / GB:.2f} GB"
    if best.total:
        gain = Fact.of("result/speedup_over_baseline", best.total.ratio, f"{_format_gain(best.total)} vs baseline")
    return [
        ("Ladder", f"{suite.title}; {len(ran) - 1} of {len(rungs) - 1} rungs ran on {device}"),
        ("Tokens/s", speeds),
        ("Peak memory", memory),
        ("Speedup", gain),
        ("Next", f"`{format_run_command(best_file)}`"),
    ]
