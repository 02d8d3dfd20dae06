"""A few steps of the real loop, recorded under torch's profiler."""

import errno
import gzip
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from infra.errors import UserError, first_line
from infra.hardware import device_facts
from infra.storage import write_json
from train.config import Cycle, TrainConfig
from train.estimate.forecast import activation_formula
from train.loop.shortage import OutOfMemory
from train.loop.trainer import Trainer
from train.profile import memory_timeline
from train.profile.trace import FORWARD, Profile, analyse, findings
from train.resolve import resolve
from train.result import RunResult

WARM, STEPS = 3, 2
"""Steps before and while recording."""


def record(config: TrainConfig, folder: Path) -> tuple[Profile, list[str]]:
    """Run a few steps of ``config`` under torch's profiler, and write what they show to ``folder``."""
    steps = WARM + STEPS + 1  # the loop does not call should_stop after its last step
    config = replace(
        resolve(config, device_facts()), steps=steps, tokens=None, time_budget=None, cycle=Cycle(steps, 0),
        keep_checkpoints=0,
    )  # fmt: skip
    moments: list[float] = []

    def after_step() -> bool:
        if trainer.state.step in (WARM, WARM + STEPS):
            if cuda:
                torch.cuda.synchronize(trainer.device)
            if trainer.state.step == WARM:
                recorder.start()
            moments.append(time.perf_counter())
            if trainer.state.step > WARM:
                recorder.stop()
        return False

    try:
        trainer = Trainer(config, should_stop=after_step)
    except OutOfMemory as failure:
        raise _ended_early(failure.result) from failure
    cuda = trainer.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    recorder = torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True, with_stack=True
    )  # fmt: skip
    plain = trainer.forward

    def forward(*batch: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function(FORWARD):
            return plain(*batch)

    trainer.forward = forward
    compiled = config.compile != "off"
    lost: list[str] = []
    with memory_timeline.history(cuda=cuda), named_kernels() if compiled and not cuda else nullcontext():
        result = trainer.run()
        if cuda:
            with _apart("memory.pickle", lost):
                memory_timeline.dump(folder / "memory.pickle")
    if result.outcome != "finished":
        raise _ended_early(result)
    _export(recorder, folder / "trace.json.gz")
    found = analyse(recorder.events() or [], STEPS, moments[1] - moments[0], cuda=cuda)
    activations = 0
    with _apart("memory.png", lost):
        activations = memory_timeline.draw(recorder, str(trainer.device), folder / "memory.png")
    attention = not config.model.lacks("attention", "manual")
    words = findings(found, optimizer=config.optimizer, compiled=compiled, cuda=cuda, attention=attention)
    if activations:
        formula = activation_formula(trainer.config)
        expected = f"; the blocks' by formula {formula[0] / 1e6:,.1f} MB: {formula[1]}" if formula else ""
        words.append(f"Activations take {activations / 1e6:,.1f} MB at most{expected}.")
    words += lost
    write_json(folder / "profile.json", asdict(found) | {"findings": words})
    return found, words


def _ended_early(result: RunResult) -> UserError:
    return UserError(f"the run to profile ended early, {result.outcome}: {result.reason}.")


@contextmanager
def _apart(what: str, lost: list[str]) -> Iterator[None]:
    """Add to ``lost`` that ``what`` is missing when an assertion in torch fails in the block: the rest is complete.

    Raises ``OSError``, because a disk that is full affects the rest too.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as failure:  # noqa: BLE001 whatever torch raises where it cannot follow a model
        lost.append(f"{what} is missing: {type(failure).__name__} in torch, {first_line(failure)}")


def named_kernels() -> AbstractContextManager[None]:
    """A context in which code compiled for the CPU reports each of its kernels, by name, to torch's profiler.

    Otherwise their time is attributed to the graph that calls them: the profiler sees what torch dispatches, and they
    are called directly.
    """
    import torch._inductor.config as inductor  # takes a second, for which uncompiled runs need not wait

    return inductor.patch({"cpp.enable_kernel_profile": True})


def _export(recorder: torch.profiler.profile, path: Path) -> None:
    """Write the trace, compressed. Raises ``OSError`` when the disk is full, which torch's writer only logs."""
    written = path.with_suffix("")
    try:
        recorder.export_chrome_trace(str(written))
        if not written.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with written.open("rb") as trace:
            trace.seek(max(0, written.stat().st_size - 100))
            if not trace.read().rstrip().endswith(b"}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            trace.seek(0)
            with gzip.open(path, "wb") as packed:
                shutil.copyfileobj(trace, packed)
    finally:
        written.unlink(missing_ok=True)
        written.with_name(f"{written.name}.tmp").unlink(missing_ok=True)  # torch leaves this when it fails
