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
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.files import write_json
from infra.tracking.store import last_steps
from infra.tracking.tracker import Tracker
from train.config import AUTO, TrainConfig
from train.data.source import absolute
from train.estimate.flops import with_matmul_efficiency
from train.estimate.memory import known_peak
from train.launch import local
from train.launch.job import Assignment, RunPlan
from train.launch.listener import Listener
from train.reporting import diagnosis, tracking
from train.resolved import without
from train.result import Diagnosis, RunResult
from train.search_reference import slower


class WorkerFailure(Exception):
    """The loop failed in its worker; the message is the worker's traceback."""


def train_and_record(run: RunPlan, config: TrainConfig, tracker: Tracker) -> RunResult:
    """Train ``run`` as ``config``, print each cycle's line, and record the result."""
    result = launch(run, config, tracker, lambda cycle: console.print(cycle["line"]))
    config = without(config, result.too_large) or config
    result = with_matmul_efficiency(result, config, run.home.place.parent)
    expected = known_peak(config)
    result = replace(
        result, diagnosis=diagnosed(run, config, result), predicted_memory=expected.total if expected else None
    )
    write_json(run.home.result, to_json(result))
    run.home.send(run.home.cycles, run.home.stream, run.home.result)
    tracking.record_end(tracker, config, result, run.home, run.memory_limit)
    tracker.status = tracking.STATUS.get(result.outcome, "FAILED")
    return result


def diagnosed(run: RunPlan, config: TrainConfig, result: RunResult) -> Diagnosis | None:
    """What was wrong with the ``result`` of a run: its memory, its speed compared with its search, or its losses."""
    found = diagnosis.of_memory(config, result, run.home.place, run.memory_limit)
    found = found or (slower(result, run.confirmed, config) if run.confirmed else None)
    return found or diagnosis.of_losses(config, result)


def launch(
    run: RunPlan, config: TrainConfig, tracker: Tracker, on_cycle: Callable[[dict[str, Any]], None] = lambda cycle: None
) -> RunResult:
    """Train ``run`` as the resolved ``config``; ``on_cycle`` is called with the report of each cycle.

    Without a checkpoint to continue from, files of an earlier run in the folder are removed. After Ctrl-C or SIGTERM
    the step is finished and saved and the outcome is ``interrupted``; if that takes too long, or Ray has not placed the
    workers yet, ``KeyboardInterrupt`` is raised. A second signal exits at once. Raises ``UserError`` when the cluster
    lacks what the config asks for or the workers do not find the checkpoint or the data, and ``WorkerFailure`` for our
    bugs in a worker of Ray's.
    """
    home = run.home
    home.path.mkdir(parents=True, exist_ok=True)
    reported, sent, step, second = 0, dict[str, int](), 0, 0
    if run.progress:
        reported, step = run.progress.reported, run.progress.step
        tracker.flush()
        sent = last_steps(tracker.key)
        second = max((last for name, last in sent.items() if name.startswith("system/")), default=0)
    elif not home.remote:
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        home.cycles.unlink(missing_ok=True)
    listener = Listener(run, config, tracker, on_cycle, sent)
    for cycle in home.cycles_until(reported):
        listener.record(cycle)
    assignment = Assignment(
        config=absolute(config),
        place=home.place,
        fingerprint=run.manifest.fingerprint,
        step=step,
        memory_limit=run.memory_limit,
        stream=run.stream,
        tries_smaller=run.asked.micro_batch == AUTO,
    )
    if run.is_local:
        returned = local.start(assignment, listener, reported, second)
    else:
        from train.launch import cluster

        returned = cluster.start(assignment, listener, reported, second)
    if returned.stream:
        write_json(home.stream, returned.stream)
        tracker.file(home.stream)
    if returned.refused:
        raise UserError(returned.refused)
    if returned.result is None:
        raise WorkerFailure(returned.failed)
    return returned.result
