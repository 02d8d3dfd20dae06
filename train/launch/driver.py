"""The driver's side of a run: train it in this process or on Ray's workers, and record what happens in MLflow.

A worker that dies is restarted and resumes from the run's newest checkpoint. Cycles that it repeats are not printed
or sent to MLflow a second time, and those that MLflow lacks are sent. The worker does not use MLflow: its thread would
compete with the loop, and a cluster's worker may not reach the store.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.cli.console import console
from infra.cli.table import Report
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.files import write_json
from infra.tracking.tracker import Tracker
from train.callbacks import Callback
from train.estimate.flops import with_matmul_efficiency
from train.estimate.memory import peak_if_known
from train.launch import local
from train.launch.job import ResolvedRun, RunJob, WorkerResult
from train.launch.listener import Listener
from train.reporting import diagnosis, tracking
from train.reporting.report import run_report
from train.result import Diagnosis, LossPrediction, RunResult
from train.search_reference import diagnose_slowdown


class WorkerFailure(Exception):
    """The loop failed in its worker; the message is the worker's traceback."""


def print_cycle(cycle: dict[str, Any]) -> None:
    console.print(cycle["line"])


def train_and_record(
    run: ResolvedRun,
    tracker: Tracker,
    on_cycle: Callable[[dict[str, Any]], None] = print_cycle,
    train: Callable[[RunJob, Listener], WorkerResult] | None = None,
    callbacks: Sequence[Callback] = (),
) -> tuple[RunResult, Report]:
    """Train ``run``, and write its result and report to its folder, from which the MLflow run of ``tracker`` gets them.

    After Ctrl-C or SIGTERM the step is finished and saved and the outcome is ``interrupted``. A second signal exits at
    once.

    Args:
        run: the run. Without a checkpoint to resume from, files of an earlier run in its folder are removed.
        tracker: the run in MLflow.
        on_cycle: called with each new cycle.
        train: trains a job; by default in this process or on Ray's workers, as the run needs it.
        callbacks: callbacks of a Python program, for a run in this process.

    Raises:
        UserError: the cluster lacks what the config needs, or the workers do not find the checkpoint or the data.
        WorkerFailure: an unexpected exception in a worker on Ray.
        KeyboardInterrupt: stopping took too long, no step was completed, or Ray had not placed the workers yet.
    """
    listener = prepare(run, tracker, on_cycle)
    if train is None and run.is_local:
        train = partial(local.train, callbacks=callbacks)
    elif train is None:
        from train.launch import cluster

        train = cluster.train
    returned = train(run.job(), listener)
    if returned.stream:
        write_json(run.run_folder.stream, returned.stream)
    if returned.user_error:
        raise UserError(returned.user_error)
    if returned.result is None:
        raise WorkerFailure(returned.traceback)
    if returned.result.outcome == "interrupted" and not returned.result.steps:
        reason = returned.result.reason
        raise KeyboardInterrupt(f"No step was completed, so nothing is saved ({reason}).")
    return record_result(run.fitted(returned.result), tracker, returned.result)


def prepare(run: ResolvedRun, tracker: Tracker, on_cycle: Callable[[dict[str, Any]], None]) -> Listener:
    """Prepare the run's folder, log its cycles that MLflow lacks, and return the listener of the next messages."""
    run_folder, manifest = run.run_folder, run.manifest
    step, reported = (run.progress.step, run.progress.last_reported_step) if run.progress else (0, 0)
    run_folder.path.mkdir(parents=True, exist_ok=True)
    if not run.progress:
        shutil.rmtree(run_folder.checkpoints, ignore_errors=True)
        run_folder.cycles.unlink(missing_ok=True)
    start = tracking.RunStart(run.config.to_json(), manifest.fingerprint, manifest.splits, step, run.memory_limit)
    write_json(run_folder.config, run.requested.to_json())
    write_json(run_folder.start, to_json(start))
    run_folder.push(run_folder.config, run_folder.start)
    tracking.fill(tracker, run_folder, until=reported)
    return Listener(run, tracker, on_cycle)


def record_result(run: ResolvedRun, tracker: Tracker, result: RunResult) -> tuple[RunResult, Report]:
    """Write ``result`` with its report and its curves to the run's folder, and log them.

    Returns: (the result with its diagnosis and the predicted memory, its report).
    """
    # matplotlib takes half a second, for which the start of a run must not wait.
    from infra.charts import describe_conditions
    from train.reporting.charts import draw_curves

    config, run_folder = run.config, run.run_folder
    result = with_matmul_efficiency(
        result, config.execution.precision, config.batch.workers, run_folder.location.parent
    )
    expected = peak_if_known(config.step)
    result = replace(
        result, diagnosis=diagnose(run, result), predicted_memory=expected.total if expected else None,
        loss_prediction=loss_prediction(run, result),
    )  # fmt: skip
    write_json(run_folder.result, to_json(result))
    step, dataset, duration = config.step, config.dataset, config.duration
    report = run_report(step, dataset, duration, result, run_folder.location, run.memory_limit)
    tracking.write_summary(run_folder, report, config.dataset, tracker.run_ref.store)
    title = f"Loss and speed of {config.model.text} on {Path(config.dataset.source).name}"
    draw_curves(
        run_folder, title, describe_conditions(result.device, run.memory_limit), result.steps,
        step_tokens=config.step_tokens, unreported_losses=result.unreported_losses,
    )  # fmt: skip
    run_folder.push(run_folder.cycles, run_folder.stream, run_folder.result, run_folder.summary, run_folder.curves)
    tracking.fill(tracker, run_folder)
    tracker.status = tracking.STATUS.get(result.outcome, "FAILED")
    return result, report


def loss_prediction(run: ResolvedRun, result: RunResult) -> LossPrediction | None:
    """Return the loss that the run's search predicted; None without one, or if the run is not the predicted one."""
    prediction = run.confirmed and run.confirmed.loss_prediction
    is_predicted = result.outcome == "finished" and result.data_fingerprint == (
        prediction and prediction.data_fingerprint
    )
    return prediction if is_predicted else None


def diagnose(run: ResolvedRun, result: RunResult) -> Diagnosis | None:
    """Return the diagnosis of a run with this ``result``: of its memory, its speed compared with its search, or its
    losses."""
    memory_diagnosis = diagnosis.diagnose_oom(run.config.step, result, run.run_folder.location, run.memory_limit)
    if memory_diagnosis is None and run.confirmed:
        memory_diagnosis = diagnose_slowdown(result, run.confirmed, run.config.execution.compile)
    return memory_diagnosis or diagnosis.of_losses(run.config.model, result)
