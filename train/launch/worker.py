"""The worker of a run: the function that Ray Train calls, on Ray's workers or in the driver's own process.

The workers agree on the checkpoint to resume from, or on a reason not to train, before the session of each begins.
"""

import os
import socket
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.exceptions import RayError

from infra.background import repeated
from infra.device.host import count_oom_kills
from infra.device.provenance import describe_machine
from infra.device.telemetry import Telemetry, prefix_node
from infra.errors import UserError, first_line
from train.launch.job import RunJob, WorkerResult
from train.launch.link import (
    POLL_SECONDS,
    CycleDone,
    EarlierWorkers,
    Link,
    Message,
    Order,
    PrintLine,
    Refusal,
    SystemMetrics,
    WorkerStarted,
)
from train.launch.session import Driver, SmallerBatchRequired, WorkerSession, step_of
from train.loop.oom import OutOfMemory
from train.models.parallel import all_gather
from train.result import RunResult
from train.run_files.run_folder import RunFolder

MAX_ATTEMPTS = 3
"""Starts from the same step after which a worker that dies is not restarted."""

SHARED_STORAGE_HINT = "Use object storage, such as --out s3://bucket/runs, or a disk that all machines share."


@dataclass(frozen=True)
class WorkerState:
    """The state of one worker before training, which it sends to the others."""

    refusal: str | None
    """The reason why the worker cannot train; None if it can."""
    step: int
    """Step of the newest checkpoint that the worker finds."""
    host: str
    """Name of the worker's machine."""
    node_id: str
    """Ray's id of the worker's machine."""
    failed_micro_batches: tuple[int, ...]
    """Micro-batches that did not fit; of the first worker only."""


def train_function(loop_config: dict[str, Any]) -> WorkerResult:
    """Train from the step that the driver names, or from a newer checkpoint of this command.

    In the driver's own process an exception that is not a ``UserError`` is raised as it is. Of several workers, the one
    that fails raises, so that Ray ends the others, which wait for it in a collective.
    """
    job: RunJob = loop_config["job"]
    link: Link = loop_config["link"]
    context = ray.train.get_context()
    rank, is_alone = context.get_world_rank(), context.get_world_size() == 1
    is_first = rank == 0
    # Workers on one machine do not share what they download and remove.
    folder = RunFolder.of(job.run_dir, "runs", job.run_dir.digest, str(rank))
    host, node_id = socket.gethostname(), link.node_id
    earlier = link.earlier_workers(node_id, count_oom_kills()) if is_first else EarlierWorkers()
    with ExitStack() as stack:
        resume, refusal = lock_and_find_checkpoint(folder, stack, job, earlier) if is_first else find_checkpoint(folder)
        states = [WorkerState(refusal, step_of(resume), host, node_id, earlier.failed_micro_batches)]
        if not is_alone:
            states = all_gather(states[0])
        if earlier.refusal and earlier.refusal.result:
            return WorkerResult(with_checkpoint(earlier.refusal.result, folder))
        if refusal := combine_refusals(states):
            return WorkerResult(user_error=refusal)
        nodes = [state.node_id for state in states]
        driver = None
        try:
            if is_first:
                hosts = [state.host for state in states]
                driver = DriverConnection(link, WorkerStarted(step_of(resume), hosts, nodes, describe_machine()))
            elif nodes.index(node_id) == rank:  # It watches its machine, where the first worker is not.
                stack.callback(link.flush)
                stack.enter_context(watch_machine(link, host))
            callbacks = loop_config.get("callbacks", ())
            result = WorkerSession(job, folder, driver, callbacks).run(resume, states[0].failed_micro_batches)
        except SmallerBatchRequired as failure:
            link.post(failure.message)
            link.flush()
            raise RuntimeError(str(failure)) from None  # Ray Train's controller reads it without torch.
        except OutOfMemory as failure:
            link.post(Refusal(failure.result.reason, failure.result))
            link.flush()
            raise RuntimeError(failure.result.reason) from None
        except UserError as mistake:
            if is_alone:
                return WorkerResult(user_error=str(mistake))
            link.post(Refusal(str(mistake)))
            link.flush()
            raise
        except torch.AcceleratorError as failure:
            if not node_id:  # A process cannot use its GPU after an error of CUDA, and this one is the driver's.
                return WorkerResult(user_error=format_gpu_failure(failure, folder))
            reason = f"The GPU of {host} failed ({first_line(failure)})."
            link.post(PrintLine(f"{reason} Ray restarts the workers from the last checkpoint."))
            link.flush()
            raise RuntimeError(reason) from None  # Ray Train's controller reads it without torch.
        except Exception:
            if is_alone and node_id:
                return WorkerResult(traceback=traceback.format_exc())
            raise
        folder.discard_copy()  # All of it has been uploaded.
        return result


def format_gpu_failure(failure: Exception, folder: RunFolder) -> str:
    """Format an error of CUDA after which this process cannot use its GPU, with the way to resume the run."""
    advice = "resume the run with --resume" if folder.newest_checkpoint()[0] else "start the run again"
    return (
        f"The GPU failed ({first_line(failure)}). Check it with nvidia-smi and the kernel's log (dmesg, Xid), then "
        f"{advice}."
    )


class DriverConnection(Driver):
    """The first worker's connection to the run's driver, with a heartbeat."""

    def __init__(self, link: Link, started: WorkerStarted) -> None:
        self._link, self._started = link, started
        self._host = started.hosts[0] if len(set(started.nodes)) > 1 else None
        """Name of this machine in its metrics, where there are several."""
        self._last_step = 0
        """Step of the last cycle that the driver knows."""
        self._stop = threading.Event()

    @contextmanager
    def connect(self, session: WorkerSession) -> Iterator[None]:
        number, recorded = self._link.start(self._started)
        self._last_step, self.telemetry_second = recorded.step, recorded.telemetry_second

        def beat() -> bool:
            """Return whether the driver has died, after which Ray ends its workers."""
            try:
                order = self._link.heartbeat(number, session.activity)
            except RayError:
                return True
            if order is Order.EXIT:  # This worker was cut off; its checkpoints would mix with the new one's.
                os._exit(1)
            if order is Order.STOP:
                self._stop.set()
            return False

        try:
            with repeated(beat, POLL_SECONDS, "heartbeat"):
                yield
        finally:
            with suppress(RayError):  # The driver has died.
                self._link.flush()

    def post(self, message: Message) -> None:
        match message:
            case CycleDone(cycle) if cycle["step"] <= self._last_step:
                return
            case SystemMetrics(second, metrics) if self._host:
                message = SystemMetrics(second, prefix_node(self._host, metrics))
        self._link.post(message)

    def should_stop(self) -> bool:
        return self._stop.is_set()

    def should_discard(self) -> bool:
        return self._stop.is_set()


def watch_machine(link: Link, host: str) -> Telemetry:
    """Return the telemetry of a machine without the first worker."""

    def send(second: int, metrics: dict[str, float]) -> None:
        link.post(SystemMetrics(second, prefix_node(host, metrics)))

    return Telemetry(send, link.recorded_progress().telemetry_second)


def lock_and_find_checkpoint(
    folder: RunFolder, stack: ExitStack, job: RunJob, earlier: EarlierWorkers
) -> tuple[Path | None, str | None]:
    """Lock the run's folder while ``stack`` is open, and find the checkpoint to resume from.

    For the first worker, which all others follow: one that gave up alone would leave them in a collective.

    Returns: (checkpoint or None, the reason not to train or None).
    """
    try:
        if earlier.refusal:
            return None, earlier.refusal.reason
        if job.driver_marker and not folder.has_file_of(job.driver_marker):
            return None, (
                f"{folder.path} on {socket.gethostname()}, where Ray placed the worker, is not the driver's folder. "
                f"{SHARED_STORAGE_HINT}"
            )
        stack.enter_context(folder.worker_lock())
        resume, _ = folder.newest_checkpoint()
        check_resume_step(folder, max(job.step, *earlier.starts, 0), step_of(resume))
        check_crash_loop(
            [*earlier.starts, step_of(resume)], MAX_ATTEMPTS + len(earlier.failed_micro_batches), earlier.out_of_memory
        )
    except UserError as mistake:
        return None, str(mistake)
    except OSError as failure:  # If it were raised, Ray would restart the worker again and again.
        return None, (
            f"{folder.path} cannot be used ({failure.strerror}). Free disk space or fix the folder, then use --resume."
        )
    return resume, None


def find_checkpoint(folder: RunFolder) -> tuple[Path | None, str | None]:
    """Return the checkpoint from which another worker than the first resumes, or the reason not to train."""
    try:
        return folder.newest_checkpoint()[0], None
    except UserError as mistake:
        return None, str(mistake)


def with_checkpoint(result: RunResult, folder: RunFolder) -> RunResult:
    """Return ``result`` of an earlier worker, which need not have been the one that knew the newest checkpoint."""
    checkpoint, _ = folder.newest_checkpoint()
    return replace(result, checkpoint=folder.checkpoint_address(checkpoint) if checkpoint else None)


def check_resume_step(folder: RunFolder, known_step: int, step: int) -> None:
    """Raise ``UserError`` if the newest checkpoint, of ``step``, is older than one of ``known_step`` has been.

    A newer one was saved by an earlier worker. An older one means that checkpoints have been lost or damaged.
    """
    if step < known_step:
        directory, host = folder.location / "checkpoints", socket.gethostname()
        newest = f"the newest intact checkpoint is step {step:,}" if step else "there is no intact checkpoint"
        raise UserError(
            f"The run should resume at step {known_step:,}, but in {directory} on {host} {newest}. Restore the newer "
            f"one, or delete its remains to resume at step {step:,}."
        )


def combine_refusals(states: Sequence[WorkerState]) -> str | None:
    """Return the reason why the workers do not train, if there is any."""
    for state in states:
        if state.refusal:
            return state.refusal
    first = states[0]
    for state in states:
        if state.step != first.step:
            return (
                f"The workers find different checkpoints: step {first.step:,} on {first.host}, step {state.step:,} on "
                f"{state.host}. {SHARED_STORAGE_HINT}"
            )
    return None


def check_crash_loop(starts: Sequence[int], max_attempts: int = MAX_ATTEMPTS, out_of_memory: bool = False) -> None:
    """Raise ``UserError`` if workers died ``max_attempts`` times without a new checkpoint, or the last one for memory.

    Args:
        starts: the steps from which the workers started; the last one is this worker's.
        max_attempts: number of starts from one step that are allowed.
        out_of_memory: whether the system killed the last worker.
    """
    step = starts[-1]
    if out_of_memory and starts[-2:] == [step] * 2:
        raise UserError(
            f"Memory ran out between step {step} and the next checkpoint, and the system killed a worker. Use a "
            "smaller --micro-batch, or a machine or container with more memory."
        )
    if list(starts[-max_attempts - 1 : -1]) == [step] * max_attempts:
        raise UserError(
            f"The worker crashed {max_attempts} times after step {step} without reaching a checkpoint. Check Ray's "
            "logs, and the machine's memory and GPU."
        )
