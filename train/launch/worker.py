"""The worker's side of a run on Ray Train, there or in this process: the loop, from the run's newest checkpoint."""

import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch

from infra.errors import UserError
from infra.provenance import machine
from infra.schema import to_json
from infra.storage_dir import StorageDir, scratch
from infra.telemetry import Telemetry, of_machine
from infra.units import GB
from pipeline.shards import MANIFEST, Manifest
from pipeline.stream import Stream
from train.checkpoint.progress import newest, read_progress, trust
from train.checkpoint.remote import fetch_newest
from train.checkpoint.run_folder import RunFolder
from train.config import AUTO, TrainConfig, config_from_json
from train.confirmed import FIRST_STEPS
from train.data.dataset import ShardData
from train.data.stream import StreamData
from train.launch.channel import Channel, EarlierWorkers, Remote, WorkerEnd
from train.loop import memory
from train.loop.memory_limit import Limit
from train.loop.sampling import closing_sample
from train.loop.shortage import OutOfMemory
from train.loop.trainer import Trainer
from train.model.parallel import all_gather
from train.resolve import without
from train.result import CycleReport, RunResult

ATTEMPTS = 3
"""Starts from the same step after which a worker that dies is not restarted."""

FETCHING_SECONDS = 10.0
"""Between two lines about the data that a worker fetches."""

SHARE = "give object storage, such as --out s3://bucket/runs, or a folder on a disk that all machines share."


@dataclass(frozen=True)
class Start:
    """What a worker is told about its start."""

    step: int = 0
    """The step that the run continues from; 0 is its beginning."""
    marker: Path | None = None
    """A file that the driver has made in the run's folder; None for a run in object storage."""
    past: EarlierWorkers = field(default_factory=EarlierWorkers)


def train_function(payload: dict[str, Any]) -> dict[str, Any]:
    """The loop, from the step that the driver names or a newer checkpoint of this command.

    It runs in Ray's workers, or in the driver's own process, where an error of ours is raised as it is.
    """
    trust(payload["checksums"])
    place, told = StorageDir(payload["place"]), payload["channel"]
    local = isinstance(told, Channel)
    channel = told if local else Remote(told)
    context = ray.train.get_context()
    rank, alone = context.get_world_rank(), context.get_world_size() == 1
    first = rank == 0
    # Workers on one machine do not share what they fetch and remove.
    home = RunFolder(scratch("runs", place.digest, str(rank)), place) if place.remote else RunFolder(place.folder)
    past = channel.past() if first else EarlierWorkers()
    marker = payload["marker"]
    start = Start(payload["step"], Path(marker) if marker else None, past)
    host, node = socket.gethostname(), "" if local else ray.get_runtime_context().get_node_id()
    hosts, nodes = [host], [node]
    with ExitStack() as locks:
        resume, refusal = begin(home, locks, start) if first else follow(home)
        too_large = past.too_large
        if not alone:
            found = all_gather((refusal, step_of(resume), host, node, too_large))
            refusal = common_refusal([theirs[:3] for theirs in found])
            hosts, nodes = [theirs[2] for theirs in found], [theirs[3] for theirs in found]
            too_large = found[0][4]
        if past.result:
            return {"result": with_checkpoint(past.result, home), "gpu": None, "stream": None}
        if refusal:
            return {"refused": refusal}
        try:
            config, asked = (config_from_json(payload[name], "the run's config") for name in ("config", "asked"))
            config = without(config, too_large) or config
            size, stream, fingerprint = (payload[name] for name in ("memory_limit", "stream", "fingerprint"))
            limit = Limit.impose(size, config.device) if size else None
            line, telemetry = None, None
            if first:
                about = {"hosts": hosts, "nodes": nodes, "machine": machine()}
                line = locks.enter_context(WorkerEnd(channel, step_of(resume), about))
                name = host if len(set(nodes)) > 1 else None
                telemetry = locks.enter_context(Telemetry(sender(channel, name), line.second))
            elif nodes.index(node) == rank:  # the first worker of another machine
                locks.enter_context(watched(channel, host))
            read: list[ShardData | StreamData] = []

            def data() -> ShardData | StreamData:
                read.append(data_of(config, stream, fingerprint, channel.say if first else lambda text: None))
                return read[-1]

            result = train_here(home, config, resume, line, limit, asked, data, telemetry, too_large)
            summary = read[-1].summary() if isinstance(read[-1], StreamData) else None
            gpu = telemetry and telemetry.gpu
            ended = {"result": to_json(result), "gpu": gpu, "stream": summary}
        except TooLarge as failure:
            channel.too_large(*failure.args)
            raise RuntimeError(failure.args[1]) from None  # which Ray Train's controller reads without torch
        except OutOfMemory as failure:
            channel.refuse(failure.result.reason, to_json(failure.result))
            raise RuntimeError(failure.result.reason) from None
        except UserError as mistake:
            if alone:
                return {"refused": str(mistake)}
            channel.refuse(str(mistake))
            raise
        except Exception:
            if alone and not local:
                return {"failed": traceback.format_exc()}
            raise  # the others wait in a collective until Ray stops the group and restarts it
        if home.remote:
            shutil.rmtree(home.path, ignore_errors=True)  # all of it is in the run's place
        return ended


def sender(channel: Channel | Remote, name: str | None) -> Callable[[int, dict[str, float]], None]:
    """What hands over a point of telemetry; with the ``name`` of its machine where there are several."""

    def send(second: int, metrics: dict[str, float]) -> None:
        channel.system(second, of_machine(name, metrics) if name else metrics)

    return send


@contextmanager
def watched(channel: Channel | Remote, name: str) -> Iterator[None]:
    """While the block runs, hand over what this machine does, where no worker has a :class:`WorkerEnd`."""
    with Telemetry(sender(channel, name), channel.second()):
        yield
    channel.flush()


def begin(home: RunFolder, locks: ExitStack, start: Start) -> tuple[Path | None, str | None]:
    """Lock the run's folder while ``locks`` is open; returns the checkpoint to continue from, or a reason not to train.

    Called by the first worker, whose answer all follow: one that left alone would leave the others in a collective.
    """
    try:
        if start.past.refusal:
            return None, start.past.refusal
        if start.marker and not start.marker.exists():
            return None, f"{home.path} on {socket.gethostname()}, where Ray placed the worker, is another disk: {SHARE}"
        locks.enter_context(home.worker_lock())
        resume = newest_checkpoint(home)
        refuse_other_step(home, start, step_of(resume))
        refuse_hopeless([*start.past.starts, step_of(resume)], ATTEMPTS + len(start.past.too_large))
    except UserError as mistake:
        return None, str(mistake)
    except OSError as failure:  # if it were raised, Ray would restart the worker again and again
        why = f"{home.path} cannot be used ({failure.strerror}): make room or fix it, then continue with --resume."
        return None, why
    return resume, None


def follow(home: RunFolder) -> tuple[Path | None, str | None]:
    """The checkpoint from which another worker than the first continues, or a reason not to train."""
    try:
        return newest_checkpoint(home), None
    except UserError as mistake:
        return None, str(mistake)


def newest_checkpoint(home: RunFolder) -> Path | None:
    """The newest intact checkpoint of the run, on this machine; None at its beginning."""
    if home.remote is None:
        return newest(home.checkpoints)
    return fetch_newest(home.remote, home.checkpoints)[0]


def step_of(checkpoint: Path | None) -> int:
    """The step of ``checkpoint``; 0 without one."""
    return read_progress(checkpoint).step if checkpoint else 0


def with_checkpoint(result: dict[str, Any], home: RunFolder) -> dict[str, Any]:
    """``result`` of an earlier worker, which need not have been the one that knew the newest checkpoint."""
    checkpoint = newest_checkpoint(home)
    return result | {"checkpoint": home.named(checkpoint) if checkpoint else None}


def refuse_other_step(home: RunFolder, start: Start, found: int) -> None:
    """Raise ``UserError`` when the newest checkpoint, of step ``found``, is older than one that was there before.

    A newer one was saved by an earlier worker; an older one means that checkpoints have been lost or damaged.
    """
    least = max(start.step, *start.past.starts, 0)
    if found < least:
        there = f"ends at step {found:,}" if found else "has no intact checkpoint"
        raise UserError(
            f"the run continues from step {least:,}, but {home.place / 'checkpoints'}, seen from {socket.gethostname()}"
            f", {there}: restore the checkpoint, or remove what is left of it to continue from the one before it."
        )


def common_refusal(found: Sequence[tuple[str | None, int, str]]) -> str | None:
    """The reason why the workers do not train, if any, from each one's refusal, newest step and machine."""
    for refusal, _, _ in found:
        if refusal:
            return refusal
    step, machine = found[0][1:]
    for other, elsewhere in (theirs[1:] for theirs in found):
        if other != step:
            return f"the run continues from step {step:,} on {machine} and from step {other:,} on {elsewhere}: {SHARE}"
    return None


def data_of(
    config: TrainConfig, stream: Stream | None, fingerprint: str, say: Callable[[str], Any] = lambda text: None
) -> ShardData | StreamData:
    """The data of a run, which must be those that the driver saw; ``say`` gets lines about what is fetched.

    Raises ``UserError``.
    """
    if stream:
        return StreamData(config, stream)
    host, place, told = socket.gethostname(), StorageDir.of(config.data), [0.0]
    if not place.remote and not place.exists(MANIFEST):
        raise UserError(
            f"--data {place} is not on {host}, where Ray placed the worker: give object storage, such as --data "
            "s3://bucket/tokens, or a folder on a disk that all machines share."
        )

    def on_shard(manifest: Manifest, number: int) -> None:
        if number == 0 or time.monotonic() - told[0] > FETCHING_SECONDS:
            told[0] = time.monotonic()
            size = sum(shard.bytes for shard in manifest.shards)
            say(f"{host} fetches {place}: {number} of {len(manifest.shards)} shards, {size / 1e6:,.1f} MB in all")

    data = ShardData(config, on_shard)
    if data.manifest.fingerprint != fingerprint:
        raise UserError(
            f"--data {place} on {host}, where Ray placed the worker, has the fingerprint "
            f"{data.manifest.fingerprint[:12]} and on the driver's machine {fingerprint[:12]}: the data differ."
        )
    return data


class TooLarge(Exception):
    """Several workers are to start again with a smaller micro-batch, which they were not given: (size, a line)."""


def train_here(
    home: RunFolder,
    config: TrainConfig,
    resume: Path | None,
    line: WorkerEnd | None,
    limit: Limit | None = None,
    asked: TrainConfig | None = None,
    data: Callable[[], ShardData | StreamData] | None = None,
    telemetry: Telemetry | None = None,
    too_large: Sequence[int] = (),
) -> RunResult:
    """Train in ``home`` from ``resume`` as one worker; the first one has a ``line`` to the driver, and ``telemetry``.

    A micro-batch that ``asked`` leaves open and that does not fit is replaced by the next smaller one, which is also
    below those that were ``too_large`` before. For that one of several workers raises ``TooLarge``, and
    ``OutOfMemory`` where there is no smaller one.
    """
    failed = [*too_large]
    while True:
        begun = step_of(resume)  # now, because training removes old checkpoints
        try:
            trainer, result = _attempt(home, config, resume, line, limit, asked, data() if data else ShardData(config))
        except OutOfMemory as failure:
            trainer, result = None, failure.result
        smaller = None
        if asked and asked.micro_batch == AUTO and did_not_fit(result, begun):
            smaller = without(config, [config.micro_batch])
        if smaller is None:
            break
        failed.append(config.micro_batch)
        said = f"micro-batch {config.micro_batch} does not fit, {result.reason}: trying {smaller.micro_batch}"
        if config.workers > 1:
            raise TooLarge(config.micro_batch, said)
        if line:
            line.too_large(config.micro_batch, said)
            line.doing = lambda: ("building the model", 0)
        trainer = None
        memory.start_over(config)
        config, resume = smaller, newest(home.checkpoints) or resume
    result = replace(result, too_large=tuple(failed))
    if trainer is None and config.workers > 1:
        raise OutOfMemory(result)
    if trainer is None or line is None:
        return result
    if telemetry:
        result = replace(result, joules_per_million_tokens=energy(telemetry, trainer, result, begun))
        result = replace(result, telemetry=trainer.while_training(telemetry))
    encoded_on = dict(trainer.data.encoded_on) if isinstance(trainer.data, StreamData) else {}
    return replace(result, sample=closing_sample(trainer, result), encoded_on=encoded_on)


def did_not_fit(result: RunResult, begun: int) -> bool:
    """Whether a run from step ``begun`` needed too much memory in its first steps or before them."""
    failing = result.steps - begun + (result.outcome == "oom")  # the step that needed it
    return result.outcome in ("oom", "over_limit") and failing <= FIRST_STEPS


def _attempt(
    home: RunFolder,
    config: TrainConfig,
    resume: Path | None,
    line: WorkerEnd | None,
    limit: Limit | None,
    asked: TrainConfig | None,
    data: ShardData | StreamData,
) -> tuple[Trainer, RunResult]:
    """One run of the loop, with its trainer. Raises ``OutOfMemory`` as the trainer does."""
    if line is None:
        trainer = Trainer(config, data=data, checkpoints=home.checkpoints, resume=resume, limit=limit, asked=asked)
        return trainer, trainer.run()
    reported = read_progress(resume).reported if resume else 0
    home.rewind(reported)
    line.catch_up(home.cycles_until(reported))
    trainer: Trainer | None = None

    def on_cycle(report: CycleReport) -> None:
        if trainer and trainer.device.type == "cuda" and len(trainer.spent.reports) == 1:
            total = limit.size if limit else torch.cuda.get_device_properties(trainer.device).total_memory
            line.say(fullness(config, memory.peak(trainer.device).process, total))
        line.cycle(home.append(report))

    line.doing = lambda: (trainer.doing, trainer.state.step) if trainer else ("building the model", reported)
    trainer = Trainer(
        config,
        data=data,
        on_cycle=on_cycle,
        should_stop=line.stopping,
        checkpoints=home.checkpoints,
        copies=home.remote,
        resume=resume,
        limit=limit,
        asked=asked,
    )
    if trainer.attention != trainer.config.attention:
        line.say(f"attention {trainer.attention} (auto)")
    return trainer, trainer.run()


def fullness(config: TrainConfig, used: int, total: int) -> str:
    """The GPU's memory at the first report, and what is done with it, as one line; sizes in bytes."""
    full = f"GPU {used / GB:.1f}/{total / GB:.1f} GB ({used / total:.1%})"
    return f"{full}; batch size {config.micro_batch}; cycle {config.cycle.train} + {config.cycle.val}"


def energy(telemetry: Telemetry, trainer: Trainer, result: RunResult, begun: int) -> float | None:
    """Joules of this worker's GPU per million tokens that it trained on after its first step, the one after ``begun``.

    None without a GPU that reports its power. Ends the telemetry, so that it knows the energy up to now.
    """
    telemetry.stop()
    if result.device == "cpu" or result.first_step_seconds is None:
        return None
    first = trainer.started + result.first_step_seconds
    joules = telemetry.joules(first, first + result.seconds - trainer.elapsed_before)
    tokens = (result.steps - begun - 1) * trainer.config.step_tokens / trainer.config.workers
    return joules / tokens * 1e6 if joules is not None and tokens > 0 else None


def refuse_hopeless(starts: Sequence[int], most: int = ATTEMPTS) -> None:
    """Raise ``UserError`` when workers have died ``most`` times without a new checkpoint.

    ``starts`` are the steps that they started from; the last one is this worker's.
    """
    step = starts[-1]
    if list(starts[-most - 1 : -1]) == [step] * most:
        raise UserError(
            f"the worker died {most} times between step {step} and the next checkpoint: look for the reason in "
            "Ray's logs, and check whether the machine has enough memory."
        )
