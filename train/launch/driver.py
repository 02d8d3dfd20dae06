"""The driver's side of a run: have it trained here or on Ray's workers, and record what is said in MLflow.

A worker that dies is restarted and continues from the run's
newest checkpoint. Cycles that it repeats are not printed or sent to MLflow a second time, and those that MLflow lacks
are sent. The worker does not use MLflow: its thread would compete with the loop, and a cluster's worker may not reach
the store.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from infra.cli.console import console
from infra.cli.table import Report
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.files import write_json
from infra.tracking.tracker import Tracker
from train.config import AUTO, ResolvedConfig
from train.estimate.flops import with_matmul_efficiency
from train.estimate.memory import peak_if_known
from train.launch import local
from train.launch.job import RunPlan, WorkerJob
from train.launch.listener import Listener
from train.model_config import format_model
from train.reporting import diagnosis, tracking
from train.reporting.charts import draw_curves
from train.reporting.report import run_report
from train.resolved import next_smaller_micro_batch
from train.result import Diagnosis, RunResult
from train.search_reference import diagnose_slowdown


class WorkerFailure(Exception):
    """The loop failed in its worker; the message is the worker's traceback."""


def train_and_record(run: RunPlan, config: ResolvedConfig, tracker: Tracker) -> tuple[RunResult, Report]:
    """Train ``run`` as ``config``, print each cycle's line, and write the result and its report to the run's folder,
    from which MLflow gets them."""
    result = launch(run, config, tracker, lambda cycle: console.print(cycle["line"]))
    run_folder, config = run.run_folder, next_smaller_micro_batch(config, result.too_large) or config
    result = with_matmul_efficiency(
        result, config.execution.precision, config.batch.workers, run_folder.location.parent
    )
    expected = peak_if_known(config)
    result = replace(
        result, diagnosis=diagnosed(run, config, result), predicted_memory=expected.total if expected else None
    )
    write_json(run_folder.result, to_json(result))
    report = run_report(config, result, run_folder.location, run.memory_limit)
    tracking.write_summary(run_folder, report, config.dataset, tracker.run_ref.store)
    draw_curves(run_folder, f"{format_model(config.model)}; {result.device}", result.steps)
    run_folder.push(run_folder.cycles, run_folder.stream, run_folder.result, run_folder.summary, run_folder.curves)
    tracking.fill(tracker, run_folder)
    tracker.status = tracking.STATUS.get(result.outcome, "FAILED")
    return result, report


def diagnosed(run: RunPlan, config: ResolvedConfig, result: RunResult) -> Diagnosis | None:
    """What was wrong with the ``result`` of a run: its memory, its speed compared with its search, or its losses."""
    memory_diagnosis = diagnosis.diagnose_oom(config, result, run.run_folder.location, run.memory_limit)
    memory_diagnosis = memory_diagnosis or (
        diagnose_slowdown(result, run.confirmed, config.execution.compile) if run.confirmed else None
    )
    return memory_diagnosis or diagnosis.of_losses(config.model, result)


def launch(
    run: RunPlan,
    config: ResolvedConfig,
    tracker: Tracker,
    on_cycle: Callable[[dict[str, Any]], None] = lambda cycle: None,
) -> RunResult:
    """Train ``run`` as the resolved ``config``; ``on_cycle`` is called with the report of each cycle.

    Without a checkpoint to continue from, files of an earlier run in the folder are removed. After Ctrl-C or SIGTERM
    the step is finished and saved and the outcome is ``interrupted``; if that takes too long, or Ray has not placed the
    workers yet, ``KeyboardInterrupt`` is raised. A second signal exits at once. Raises ``UserError`` when the cluster
    lacks what the config asks for or the workers do not find the checkpoint or the data, and ``WorkerFailure`` for our
    bugs in a worker of Ray's.
    """
    run_folder = run.run_folder
    run_folder.path.mkdir(parents=True, exist_ok=True)
    reported, step = (run.progress.reported, run.progress.step) if run.progress else (0, 0)
    if not run.progress:
        shutil.rmtree(run_folder.checkpoints, ignore_errors=True)
        run_folder.cycles.unlink(missing_ok=True)
    start = tracking.RunStart(config.to_json(), run.manifest.fingerprint, run.manifest.splits, step, run.memory_limit)
    write_json(run_folder.config, run.requested.to_json())
    write_json(run_folder.start, to_json(start))
    run_folder.push(run_folder.config, run_folder.start)
    tracking.fill(tracker, run_folder, until=reported)
    listener = Listener(run, config, tracker, on_cycle)
    second = tracker.logged.last_step("system/")
    assignment = WorkerJob(
        config=config,
        run_dir=run_folder.location,
        fingerprint=run.manifest.fingerprint,
        step=step,
        memory_limit=run.memory_limit,
        source=run.source,
        retries_smaller_batch=config.requested.batch.micro_batch == AUTO,
    )
    if run.is_local:
        returned = local.run_training(assignment, listener, reported, second)
    else:
        from train.launch import cluster

        returned = cluster.run_training(assignment, listener, reported, second)
    if returned.stream:
        write_json(run_folder.stream, returned.stream)
    if returned.user_error:
        raise UserError(returned.user_error)
    if returned.result is None:
        raise WorkerFailure(returned.traceback)
    return returned.result
