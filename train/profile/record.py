"""Record a few steps of the training loop with torch's profiler."""

import errno
import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

from infra.charts import describe_conditions
from infra.errors import UserError, first_line
from infra.storage.files import write_json
from train.config import Cycle, ResolvedConfig
from train.data.sources import source_of
from train.estimate.estimates import estimates_of
from train.loop.oom import OutOfMemory
from train.loop.trainer import Callbacks, Trainer
from train.profile import memory_timeline
from train.profile.trace import FORWARD, Profile, analyze, findings
from train.result import RunResult

WARMUP_STEPS, STEPS = 3, 2
"""Number of steps before and during the recording."""


def record(
    config: ResolvedConfig, folder: Path, draw: Callable[..., int] = memory_timeline.draw
) -> tuple[Profile, list[str]]:
    """Run a few steps of ``config`` with torch's profiler, and write traces and charts to ``folder``.

    ``draw`` draws the memory over time, and returns the peak of the activations in bytes.

    Returns: (the profile, sentences with the findings).
    """
    steps = WARMUP_STEPS + STEPS + 1  # The loop does not call should_stop after its last step.
    config = config.replace(
        steps=steps, tokens=None, time_budget=None, cycle=Cycle(steps, 0),
        keep_checkpoints=0,
    )  # fmt: skip
    moments: list[float] = []

    def after_step() -> bool:
        if trainer.state.step in (WARMUP_STEPS, WARMUP_STEPS + STEPS):
            if cuda:
                torch.cuda.synchronize(trainer.device)
            if trainer.state.step == WARMUP_STEPS:
                recorder.start()
            moments.append(time.perf_counter())
            if trainer.state.step > WARMUP_STEPS:
                recorder.stop()
        return False

    try:
        data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
        trainer = Trainer(config, data, Callbacks(should_stop=after_step))
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
    compiled = config.execution.compile != "off"
    missing: list[str] = []
    with memory_timeline.history(cuda=cuda), named_kernels() if compiled and not cuda else nullcontext():
        result = trainer.run()
        if cuda:
            with _optional_output("memory.pickle", missing):
                memory_timeline.dump(folder / "memory.pickle")
    if result.outcome != "finished":
        raise _ended_early(result)
    _export(recorder, folder / "trace.json.gz")
    profile = analyze(recorder.events() or [], STEPS, moments[1] - moments[0], cuda=cuda)
    activations = 0
    with _optional_output("memory.png", missing):
        title = f"Memory of {config.model.text}, micro-batch {config.batch.micro_batch}, over {STEPS} steps"
        conditions = describe_conditions(result.device, None)
        activations = draw(recorder, str(trainer.device), folder / "memory.png", title, conditions)
    attention = not config.model.unsupported_reason("attention", "manual")
    sentences = findings(
        profile, optimizer=config.optimization.optimizer, compiled=compiled, cuda=cuda, attention=attention
    )
    if activations:
        formula = estimates_of(trainer.config.model).activation_formula(
            trainer.config.batch.micro_batch, trainer.config.execution.precision
        )
        predicted = f"; formula for the blocks: {formula[0] / 1e6:,.1f} MB, {formula[1]}" if formula else ""
        sentences.append(f"Activations peak at {activations / 1e6:,.1f} MB{predicted}.")
    sentences += missing
    write_json(folder / "profile.json", asdict(profile) | {"findings": sentences})
    return profile, sentences


def _ended_early(result: RunResult) -> UserError:
    return UserError(
        f"The run to profile ended early with the outcome {result.outcome}: {result.reason}. Fix the cause, or choose "
        "other settings."
    )


@contextmanager
def _optional_output(file: str, missing: list[str]) -> Iterator[None]:
    """Add a sentence to ``missing`` if torch raises an exception in the block, because the other files are complete.

    Raises ``OSError``, because a full disk also affects the other files.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as failure:  # noqa: BLE001 torch raises various errors for models it does not support
        missing.append(f"{file} is missing because torch raised {type(failure).__name__}: {first_line(failure)}")


def named_kernels() -> AbstractContextManager[None]:
    """Return a context in which code compiled for the CPU reports each of its kernels by name to torch's profiler.

    Otherwise the profiler attributes their time to the whole graph, because it only records operators that torch
    dispatches, and a compiled graph calls its kernels directly.
    """
    import torch._inductor.config as inductor  # The import takes a second, and only compiled runs need it.

    return inductor.patch({"cpp.enable_kernel_profile": True})


def _export(recorder: torch.profiler.profile, path: Path) -> None:
    """Write the trace, compressed. Raises ``OSError`` if the disk is full, which torch's writer only logs."""
    trace_file = path.with_suffix("")
    try:
        recorder.export_chrome_trace(str(trace_file))
        if not trace_file.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with trace_file.open("rb") as trace:
            trace.seek(max(0, trace_file.stat().st_size - 100))
            if not trace.read().rstrip().endswith(b"}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            trace.seek(0)
            with gzip.open(path, "wb") as compressed:
                shutil.copyfileobj(trace, compressed)
    finally:
        trace_file.unlink(missing_ok=True)
        trace_file.with_name(f"{trace_file.name}.tmp").unlink(missing_ok=True)  # torch leaves it when it fails.
