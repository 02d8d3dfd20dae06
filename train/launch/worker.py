"""The worker's side of a run on Ray Train, there or in this process: the loop, from the run's newest checkpoint."""

import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

from infra.cli.units import GB
from infra.device.host import count_oom_kills
from infra.device.provenance import machine
from infra.device.telemetry import Telemetry, prefix_node
from infra.errors import UserError
from pipeline.shards import Manifest
from train.config import Cycle, ResolvedConfig
from train.data.source import TrainingData
from train.data.sources import source_of
from train.launch.channel import Channel, DriverConnection, EarlierWorkers
from train.launch.job import WorkerJob, WorkerResult
from train.loop import memory
from train.loop.execution import configure_allocator
from train.loop.memory_limit import MemoryLimit
from train.loop.oom import OutOfMemory
from train.loop.sampling import closing_sample
from train.loop.trainer import Trainer
from train.models.parallel import all_gather
from train.reporting.diagnosis import first_loss_fault
from train.resolved import next_smaller_micro_batch
from train.result import CycleReport, RunResult
from train.run_files.progress import newest, read_progress
from train.run_files.run_folder import RunFolder
from train.search_reference import FIRST_STEPS

ATTEMPTS = 3
"""Starts from the same step after which a worker that dies is not restarted."""

FETCHING_SECONDS = 10.0
"""Between two lines about the data that a worker fetches."""

SHARED_STORAGE_HINT = (
    "give object storage, such as --out s3://bucket/runs, or a folder on a disk that all machines share."
)


def train_function(loop_config: dict[str, Any]) -> WorkerResult:
    """The loop, from the step that the driver names or a newer checkpoint of this command.

    It runs in Ray's workers, or in the driver's own process, where an error of ours is raised as it is.
    """
    assignment: WorkerJob = loop_config["assignment"]
    channel: Channel = loop_config["channel"]
    local = isinstance(channel, Channel)
    context, run_dir = ray.train.get_context(), assignment.run_dir
    rank, alone = context.get_world_rank(), context.get_world_size() == 1
    first = rank == 0
    # Workers on one machine do not share what they fetch and remove.
    run_folder = RunFolder.of(run_dir, "runs", run_dir.digest, str(rank))
    host, node = socket.gethostname(), "" if local else ray.get_runtime_context().get_node_id()
    past = channel.earlier_workers(node, count_oom_kills()) if first else EarlierWorkers()
    hosts, nodes = [host], [node]
    with ExitStack() as locks:
        resume, refusal = (
            lock_and_find_checkpoint(run_folder, locks, assignment, past) if first else find_checkpoint(run_folder)
        )
        too_large = past.too_large
        if not alone:
            worker_states = all_gather((refusal, step_of(resume), host, node, too_large))
            refusal = combine_refusals([worker_state[:3] for worker_state in worker_states])
            hosts, nodes = [state[2] for state in worker_states], [state[3] for state in worker_states]
            too_large = worker_states[0][4]
        if past.result:
            return WorkerResult(with_checkpoint(past.result, run_folder))
        if refusal:
            return WorkerResult(user_error=refusal)
        try:
            config = assignment.config
            config = next_smaller_micro_batch(config, too_large) or config
            configure_allocator(config.execution.allocator)
            limit = (
                MemoryLimit.apply(assignment.memory_limit, config.execution.device) if assignment.memory_limit else None
            )
            driver, telemetry = None, None
            if first:
                about = {"hosts": hosts, "nodes": nodes, "machine": machine()}
                driver = locks.enter_context(DriverConnection(channel, step_of(resume), about))
                name = host if len(set(nodes)) > 1 else None
                telemetry = locks.enter_context(Telemetry(sender(channel, name), driver.telemetry_second))
            elif nodes.index(node) == rank:  # the first worker of another machine
                locks.callback(channel.flush)
                locks.enter_context(Telemetry(sender(channel, host), channel.telemetry_second()))
            read: list[TrainingData] = []

            def data() -> TrainingData:
                read.append(load_data(assignment, channel.print_line if first else lambda text: None))
                return read[-1]

            smaller = assignment.retries_smaller_batch
            result = train_with_retries(run_folder, config, resume, driver, limit, smaller, data, telemetry, too_large)
            ended = WorkerResult(result, read[-1].summary())
        except TooLarge as failure:
            channel.too_large(*failure.args)
            raise RuntimeError(failure.args[1]) from None  # which Ray Train's controller reads without torch
        except OutOfMemory as failure:
            channel.refuse(failure.result.reason, failure.result)
            raise RuntimeError(failure.result.reason) from None
        except UserError as mistake:
            if alone:
                return WorkerResult(user_error=str(mistake))
            channel.refuse(str(mistake))
            raise
        except Exception:
            if alone and not local:
                return WorkerResult(traceback=traceback.format_exc())
            raise  # the others wait in a collective until Ray stops the group and restarts it
        run_folder.discard_copy()  # All of it has been uploaded.
        return ended


def sender(channel: Channel, name: str | None) -> Callable[[int, dict[str, float]], None]:
    """What hands over a point of telemetry; with the ``name`` of its machine where there are several."""

    def send(second: int, metrics: dict[str, float]) -> None:
        channel.system(second, prefix_node(name, metrics) if name else metrics)

    return send


def lock_and_find_checkpoint(
    run_folder: RunFolder, locks: ExitStack, assignment: WorkerJob, past: EarlierWorkers
) -> tuple[Path | None, str | None]:
    """Lock the run's folder while ``locks`` is open; returns the checkpoint to continue from, or a reason not to train.

    Called by the first worker, whose answer all follow: one that left alone would leave the others in a collective.
    """
    try:
        if past.refusal:
            return None, past.refusal
        if assignment.driver_marker and not run_folder.sees(assignment.driver_marker):
            return (
                None,
                f"{run_folder.path} on {socket.gethostname()}, where Ray placed the worker, is another disk: "
                f"{SHARED_STORAGE_HINT}",
            )
        locks.enter_context(run_folder.worker_lock())
        resume, _ = run_folder.newest_checkpoint()
        check_resume_step(run_folder, max(assignment.step, *past.starts, 0), step_of(resume))
        check_crash_loop([*past.starts, step_of(resume)], ATTEMPTS + len(past.too_large), past.out_of_memory)
    except UserError as mistake:
        return None, str(mistake)
    except OSError as failure:  # if it were raised, Ray would restart the worker again and again
        why = (
            f"{run_folder.path} cannot be used ({failure.strerror}): make room or fix it, then continue with --resume."
        )
        return None, why
    return resume, None


def find_checkpoint(run_folder: RunFolder) -> tuple[Path | None, str | None]:
    """The checkpoint from which another worker than the first continues, or a reason not to train."""
    try:
        return run_folder.newest_checkpoint()[0], None
    except UserError as mistake:
        return None, str(mistake)


def step_of(checkpoint: Path | None) -> int:
    """The step of ``checkpoint``; 0 without one."""
    return read_progress(checkpoint).step if checkpoint else 0


def with_checkpoint(result: RunResult, run_folder: RunFolder) -> RunResult:
    """``result`` of an earlier worker, which need not have been the one that knew the newest checkpoint."""
    checkpoint, _ = run_folder.newest_checkpoint()
    return replace(result, checkpoint=run_folder.checkpoint_address(checkpoint) if checkpoint else None)


def check_resume_step(run_folder: RunFolder, last_reported_step: int, step: int) -> None:
    """Raise ``UserError`` when the newest checkpoint, of step ``step``, is older than the one of step
    ``last_reported_step``.

    A newer one was saved by an earlier worker; an older one means that checkpoints have been lost or damaged.
    """
    if step < last_reported_step:
        newest = f"the newest intact checkpoint is step {step:,}" if step else "there is no intact checkpoint"
        raise UserError(
            f"The run should resume at step {last_reported_step:,}, but in {run_folder.location / 'checkpoints'} on "
            f"{socket.gethostname()} {newest}. Restore the newer one, or delete its remains to resume at step {step:,}."
        )


def combine_refusals(worker_states: Sequence[tuple[str | None, int, str]]) -> str | None:
    """The reason why the workers do not train, if any, from each one's refusal, newest step and machine."""
    for refusal, _, _ in worker_states:
        if refusal:
            return refusal
    step, machine = worker_states[0][1:]
    for other, elsewhere in (worker_state[1:] for worker_state in worker_states):
        if other != step:
            return (
                f"the run continues from step {step:,} on {machine} and from step {other:,} on {elsewhere}: "
                f"{SHARED_STORAGE_HINT}"
            )
    return None


def load_data(assignment: WorkerJob, say: Callable[[str], Any] = lambda text: None) -> TrainingData:
    """The data of a run, which must be those that the driver saw; ``say`` gets lines about what is fetched."""
    config, fingerprint = assignment.config, assignment.fingerprint
    source = assignment.source or source_of(config.dataset)
    host, last_report, named = socket.gethostname(), [0.0], f"{config.dataset.flag} {config.dataset.source}"
    source.check_reachable(host)

    def on_shard(manifest: Manifest, number: int) -> None:
        if number == 0 or time.monotonic() - last_report[0] > FETCHING_SECONDS:
            last_report[0] = time.monotonic()
            size = sum(shard.bytes for shard in manifest.shards)
            total = f"{len(manifest.shards)} shards, {size / 1e6:,.1f} MB in all"
            say(f"{host} fetches {config.dataset.source}: {number} of {total}")

    data = source.open(config.model, config.batch, config.duration.cycle, on_shard)
    if data.manifest.fingerprint != fingerprint:
        raise UserError(
            f"{named} on {host}, where Ray placed the worker, has the fingerprint "
            f"{data.manifest.fingerprint[:12]} and on the driver's machine {fingerprint[:12]}: the data differ."
        )
    return data


class TooLarge(Exception):
    """Several workers are to start again with a smaller micro-batch, which they were not given: (size, a line)."""


def train_with_retries(
    run_folder: RunFolder,
    config: ResolvedConfig,
    resume: Path | None,
    driver: DriverConnection | None,
    limit: MemoryLimit | None = None,
    tries_smaller: bool = False,
    data: Callable[[], TrainingData] | None = None,
    telemetry: Telemetry | None = None,
    too_large: Sequence[int] = (),
) -> RunResult:
    """Train in ``run_folder`` from ``resume`` as one worker; the first one has a ``driver`` to the driver, and
    ``telemetry``.

    With ``tries_smaller`` a micro-batch that does not fit is replaced by the next smaller one, which is also below
    those that were ``too_large`` before. For that one of several workers raises ``TooLarge``, and ``OutOfMemory`` where
    there is no smaller one.
    """
    failed = [*too_large]
    while True:
        start_step = step_of(resume)  # now, because training removes old checkpoints
        try:
            trainer, result = _train_once(
                run_folder,
                config,
                resume,
                driver,
                limit,
                data() if data else source_of(config.dataset).open(config.model, config.batch, config.duration.cycle),
            )
        except OutOfMemory as failure:
            trainer, result = None, failure.result
        smaller = None
        if tries_smaller and did_not_fit(result, start_step):
            smaller = next_smaller_micro_batch(config, [config.batch.micro_batch])
        if smaller is None:
            break
        failed.append(config.batch.micro_batch)
        message = (
            f"micro-batch {config.batch.micro_batch} does not fit, {result.reason}: trying {smaller.batch.micro_batch}"
        )
        if config.batch.workers > 1:
            raise TooLarge(config.batch.micro_batch, message)
        if driver:
            driver.channel.too_large(config.batch.micro_batch, message)
            driver.activity = lambda: ("building the model", 0)
        trainer = None
        memory.reset_after_oom(config.execution)
        config, resume = smaller, newest(run_folder.checkpoints) or resume
    result = replace(result, too_large=tuple(failed))
    if trainer is None and config.batch.workers > 1:
        raise OutOfMemory(result)
    if trainer is None or driver is None:
        return result
    if telemetry:
        result = replace(result, joules_per_million_tokens=energy(telemetry, trainer, result, start_step))
        result = replace(result, telemetry=trainer.while_training(telemetry))
    encoded_on = dict(trainer.data.encoded_on)
    text = None
    try:
        text = closing_sample(trainer, result)
    except UserError as fault:  # of the model in evaluation mode, which must not cost the result
        driver.channel.print_line(str(fault))
    return replace(result, sample=text, encoded_on=encoded_on)


def did_not_fit(result: RunResult, start_step: int) -> bool:
    """Whether a run from step ``start_step`` needed too much memory in its first steps or before them."""
    failing = result.steps - start_step + (result.outcome == "oom")  # the step that needed it
    return result.outcome in ("oom", "over_limit") and failing <= FIRST_STEPS


def _train_once(
    run_folder: RunFolder,
    config: ResolvedConfig,
    resume: Path | None,
    driver: DriverConnection | None,
    limit: MemoryLimit | None,
    data: TrainingData,
) -> tuple[Trainer, RunResult]:
    """One run of the loop, with its trainer. Raises ``OutOfMemory`` as the trainer does."""
    if driver is None:  # of another worker than the first, which alone reports and saves
        trainer = Trainer(config, data=data, checkpoints=run_folder.checkpoints, resume=resume, limit=limit)
        return trainer, trainer.run()
    reported = read_progress(resume).reported if resume else 0
    run_folder.truncate_after(reported)
    driver.catch_up(run_folder.cycles_until(reported))
    trainer: Trainer | None = None

    def on_cycle(report: CycleReport) -> None:
        if fault := first_loss_fault(config.model, report.first_loss):
            driver.channel.print_line(fault)
        if trainer and trainer.device.type == "cuda" and len(trainer.times.reports) == 1:
            total = limit.size if limit else torch.cuda.get_device_properties(trainer.device).total_memory
            driver.channel.print_line(
                format_gpu_memory(
                    config.batch.micro_batch, config.duration.cycle, memory.peak(trainer.device).process, total
                )
            )
        driver.channel.cycle(run_folder.append_report(report))

    driver.activity = lambda: (trainer.activity, trainer.state.step) if trainer else ("building the model", reported)
    trainer = Trainer(
        config,
        data=data,
        on_cycle=on_cycle,
        should_stop=driver.stopping,
        checkpoints=run_folder.checkpoints,
        upload_dir=run_folder.copy_of,
        resume=resume,
        limit=limit,
    )
    if trainer.attention != trainer.config.execution.attention:
        driver.channel.print_line(f"attention {trainer.attention} (auto)")
    return trainer, trainer.run()


def format_gpu_memory(micro_batch: int, cycle: Cycle, used: int, total: int) -> str:
    """The GPU's memory at the first report, and what is done with it, as one line; sizes in bytes."""
    full = f"GPU {used / GB:.1f}/{total / GB:.1f} GB ({used / total:.1%})"
    cycle = cycle
    return f"{full}; batch size {micro_batch}; cycle {cycle.train} + {cycle.val}"


def energy(telemetry: Telemetry, trainer: Trainer, result: RunResult, start_step: int) -> float | None:
    """Joules of this worker's GPU per million tokens that it trained on after its first step, the one after
    ``start_step``.

    None without a GPU that reports its power. Ends the telemetry, so that it knows the energy up to now.
    """
    telemetry.stop()
    if result.device == "cpu" or result.first_step_seconds is None:
        return None
    first = trainer.started + result.first_step_seconds
    joules = telemetry.joules(first, first + result.seconds - trainer.elapsed_before)
    tokens = (result.steps - start_step - 1) * trainer.config.step_tokens / trainer.config.batch.workers
    return joules / tokens * 1e6 if joules is not None and tokens > 0 else None


def check_crash_loop(starts: Sequence[int], max_attempts: int = ATTEMPTS, out_of_memory: bool = False) -> None:
    """Raise ``UserError`` when workers have died ``max_attempts`` times without a new checkpoint, or the last one for
    memory.

    ``starts`` are the steps that they started from; the last one is this worker's. ``out_of_memory`` tells whether the
    system has killed the worker before it.
    """
    step = starts[-1]
    if out_of_memory and starts[-2:] == [step] * 2:
        raise UserError(
            f"Memory ran out between step {step} and the next checkpoint, and the system killed a worker: give a "
            "smaller --micro-batch, or give the machine or container more memory."
        )
    if list(starts[-max_attempts - 1 : -1]) == [step] * max_attempts:
        raise UserError(
            f"The worker crashed {max_attempts} times after step {step} without reaching a checkpoint. Check Ray's "
            "logs and the machine's memory."
        )
