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
from train.intervals import Difference, t_quantile
from train.reporting.report import speed_fact
from tune.suite.runs import SAME_BATCH, RungResult
from tune.suite.suites import Suite
from tune.trial.compare import InterleavedRuns, difference_fact
from tune.trial.row import TrialRow


def compare_rungs(controls: Sequence[RungResult], rungs: Sequence[RungResult], out: StorageDir) -> list[RungResult]:
    """Compare the baseline and the rungs; ``out`` is the folder with the measurements of infra.doctor."""
    runs = [rung for rung in rungs if rung.speed]
    speeds = InterleavedRuns([control.speed for control in controls if control.speed], [rung.speed for rung in runs])
    tokens = min(len(run.row.losses) * run.row.step_tokens for run in (controls[0], *runs) if run.row)
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
    """Return the mean training loss over the last fifth of the first ``tokens`` tokens, on which every rung has
    trained."""
    losses = [loss for trained_tokens, loss in trial.curve if 0.8 * tokens < trained_tokens <= tokens]
    return statistics.fmean(losses) if losses else None


def results_table(suite: Suite, rungs: Sequence[RungResult]) -> Table:
    """Build the table of all rungs; a rung that was skipped only has its name."""
    step_time = f"s/{suite.steps_timed} steps" if suite.steps_timed > 1 else "s/step"
    kernels = {rung.row.result.attention for rung in rungs if rung.row and rung.row.result}
    heading = (
        "rung", "batch (sequences)", "tokens/s", "95% CI", "vs previous", "vs baseline", step_time,
        "peak memory (GB)", "predicted (GB)", "loss (nats/token)", "attention kernel",
    )  # fmt: skip
    rows = []
    for rung in rungs:
        # The batch column distinguishes the two runs of a rung.
        name, row, speed = rung.name.removesuffix(SAME_BATCH), rung.row, rung.speed
        if row is None or speed is None:
            rows.append((name, *[""] * (len(heading) - 1)))
            continue
        predicted = f"{row.predicted_memory / GB:.2f}" if row.predicted_memory else "-"
        rows.append((
            name + "*" * rung.changes_numerics,
            rung.batch,
            f"{speed.middle:,.0f}",
            speed.interval,
            rung.step.text if suite.cumulative and rung.step else "",
            rung.total.text if rung.total else "",
            three_digits(suite.steps_timed * row.step_tokens / speed.middle),
            f"{(row.memory or 0) / GB:.2f}",
            predicted,
            f"{rung.loss:.3f}" if rung.loss is not None else "-",
            row.result.attention if row.result and len(kernels) > 1 else "",
        ))  # fmt: skip
    return without_empty_columns(suite.title, heading, rows)


def three_digits(value: float) -> str:
    """Format ``value`` with three significant digits, so that all numbers of a column are equally precise."""
    return f"{value:#.3g}".rstrip(".")


def legend(suite: Suite, rungs: Sequence[RungResult], controls: Sequence[float]) -> list[str]:
    """Return sentences below the table: reasons for skipped rungs, drift of the control, explanations, and total
    speedup."""
    sentences = [f"{rung.name}: skipped; {rung.reason}." for rung in rungs if rung.reason]
    sentences.append(
        f"The control ran {len(controls)} times: {controls[0]:,.0f} tokens/s first, {controls[-1]:,.0f} tokens/s last, "
        f"range {min(controls):,.0f} to {max(controls):,.0f}."
    )
    notes = {
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
            utilization(rungs).rows
        ),
    }
    sentences += [note for note, applies in notes.items() if applies]
    totals = [(rung.name, rung.total) for rung in rungs if rung.total]
    if not any(rung.changes for rung in suite.rungs):
        alarms = sum(total.is_significant for _, total in totals)
        sentences.append(f"{alarms} of {len(totals)} identical runs were judged different; at most 5% are expected.")
    if suite.cumulative and totals:
        sentences.append(f"Total speedup over the baseline: {totals[-1][1]}.")
    return sentences


def effects_table(rungs: Sequence[RungResult]) -> Table:
    """Build the table of changes in memory and speed relative to the baseline, each with a verdict."""
    base, rows = rungs[0].memory, []
    for rung in rungs[1:]:
        if rung.memory is None or rung.total is None or not base:
            continue
        growth = rung.memory / base - 1
        saves_memory = "yes" if growth < -0.01 else "no"
        is_faster = ("yes" if rung.total.ratio > 1 else "no") if rung.total.is_significant else "not significant"
        rows.append((rung.name, f"{saves_memory} ({growth:+.1%})", f"{is_faster} ({rung.total.ratio - 1:+.1%})"))
    return Table("Effect vs baseline", ("rung", "saves memory", "is faster"), rows)


def equal_work_table(rungs: Sequence[RungResult], *, cumulative: bool) -> Table:
    """Build the table of rungs that ran twice, with the changes in memory and speed at both batches."""
    previous_rung, rows = rungs[0], []
    for rung, next_rung in zip(rungs, [*rungs[1:], None], strict=True):
        if next_rung and rung.name == next_rung.name + SAME_BATCH:
            change = _gain(rung, previous_rung if cumulative else rungs[0], rung.step if cumulative else rung.total)
            rows.append((next_rung.name, *change, *_gain(next_rung, rung, next_rung.step)))
        if rung.speed:
            previous_rung = rung
    reference = "the previous rung" if cumulative else "the baseline"
    title = f"Each change at the batch of {reference}, then with its larger batch"
    columns = (
        "rung", "batch (sequences)", f"memory vs {reference.split()[-1]}", f"speed vs {reference.split()[-1]}",
        "larger batch (sequences)", "memory vs same batch", "speed vs same batch",
    )  # fmt: skip
    return Table(title, columns, rows)


def _gain(rung: RungResult, reference: RungResult, step: Difference | None) -> tuple[str, ...]:
    """Return the cells with the batch of a rung, and its change in memory and speedup relative to the ``reference``."""
    if rung.memory is None:
        return ("not run", "", "")
    growth = f"{rung.memory / reference.memory - 1:+.0%}" if reference.memory else ""
    return (rung.batch, growth, step.text if step and reference.speed else "")


def held_out_table(suite: Suite, rungs: Sequence[RungResult]) -> Table:
    """Build the table of rungs that ran with several seeds, with their validation losses and the changes in them.

    A change is the mean over the seeds with Student's 95% interval. Both runs with a seed have the same initial weights
    and the same batches.
    """
    rows = []
    for rung in rungs:
        changes = [loss - previous_loss for previous_loss, loss in rung.held_out]
        if len(changes) < 2:
            continue
        middle = statistics.fmean(changes)
        half_width = t_quantile(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
        verdict = "not significant" if abs(middle) <= half_width else "higher" if middle > 0 else "lower"
        mean = statistics.fmean(loss for _, loss in rung.held_out)
        rows.append((rung.name.removesuffix(SAME_BATCH), f"{mean:.4f}", f"{middle:+.4f} ±{half_width:.4f}", verdict))
    reference = "previous rung" if suite.cumulative else "baseline"
    title = f"Validation loss over {suite.seeds} seeds"
    return Table(title, ("rung", "validation loss (nats/token)", f"change vs {reference} (95% CI)", "verdict"), rows)


def utilization(rungs: Sequence[RungResult]) -> Table:
    """Build the table of model TFLOP/s and utilization by rung; empty if the device's peak is unknown."""
    results = [(rung, rung.row.result) for rung in rungs if rung.row and rung.row.result]
    speeds = [(rung, result, result.flops_per_second) for rung, result in results if result.flops_per_second]
    rows = [
        (rung.name, f"{flops / 1e12:,.3g}", *map(_percent, (result.mfu, result.hfu, rung.ceiling)))
        for rung, result, flops in speeds
        if any(result.mfu or rung.ceiling for rung, result, _ in speeds)
    ]
    return without_empty_columns("Utilization", ("rung", "model TFLOP/s", "MFU", "HFU", "% of matmul ceiling"), rows)


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def without_empty_columns(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Build a table without its empty columns, such as MFU on a CPU."""
    columns = [column for column in zip(heading, *rows, strict=True) if set(column[1:]) - {"", "-"}]
    heading, *rows = zip(*columns, strict=True) if columns else [heading]
    return Table(title, heading, rows)


def detail_tables(suite: Suite, rungs: Sequence[RungResult]) -> list[Table]:
    """Build the tables below the results, without empty ones."""
    batches, losses = equal_work_table(rungs, cumulative=suite.cumulative), held_out_table(suite, rungs)
    tables = [*[effects_table(rungs)] * (not suite.cumulative), batches, losses, utilization(rungs)]
    return [table for table in tables if table.rows]


def summary_fields(suite: Suite, rungs: Sequence[RungResult], device: str) -> list[tuple[str, str]]:
    """Return the first lines of a ladder's report, without the next command: (name, text)."""
    runs = [(rung.speed, rung) for rung in rungs if rung.speed]
    (base_speed, base), (speed, best) = runs[0], max(runs, key=lambda run: run[0].middle)
    memory, gain = f"{(best.memory or 0) / GB:.2f} GB", "none; no rung is faster than the baseline"
    speeds = baseline_speed = speed_fact(base_speed, "result/baseline_tokens_per_second")
    if best is not base:
        speeds = Fact.joined(
            Fact.joined(best.name, speed_fact(speed, "result/best_tokens_per_second"), separator=" "),
            Fact.joined("baseline", baseline_speed, separator=" "),
        )
        memory = f"{best.name} {memory}; baseline {(base.memory or 0) / GB:.2f} GB"
    if best.total:
        gain = difference_fact("result/speedup_over_baseline", best.total, f"{best.total} vs baseline")
    return [
        ("Ladder", f"{suite.title}; {len(runs) - 1} of {len(rungs) - 1} rungs ran on {device}"),
        ("Tokens/s", speeds),
        ("Peak memory", memory),
        ("Speedup", gain),
    ]
