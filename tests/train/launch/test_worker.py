"""The worker of a run, in this process: the checkpoint that it resumes from, or why it does not train."""

import os
import re
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray.train
import ray.train.torch
import torch
from trainers import make_trainer

from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from pipeline.shards import checksum, read_manifest
from train.callbacks import Callback, TrainStep
from train.config import ResolvedConfig
from train.launch.job import RunJob, WorkerJob
from train.launch.link import (
    Channel,
    CycleDone,
    EarlierWorkers,
    PrintLine,
    RecordedProgress,
    Refusal,
    SystemMetrics,
    WorkerStarted,
)
from train.launch.session import Driver, WorkerSession
from train.launch.worker import (
    MAX_ATTEMPTS,
    DriverConnection,
    WorkerState,
    check_crash_loop,
    combine_refusals,
    lock_and_find_checkpoint,
    train_function,
    with_checkpoint,
)
from train.model_config import ModelConfig
from train.result import RunResult
from train.run_files import progress
from train.run_files.lookup import find_run
from train.run_files.progress import checkpoints_in
from train.run_files.run_folder import RunFolder


def job_of(folder: RunFolder, config: ResolvedConfig, step: int = 0) -> RunJob:
    fingerprint = read_manifest(config.dataset.data).fingerprint
    return RunJob(config, run_dir=folder.location, fingerprint=fingerprint, step=step)


def train(folder: RunFolder, config: ResolvedConfig, resume: Path | None = None) -> RunResult:
    result = WorkerSession(WorkerJob(config), folder, Driver()).run(resume).result
    assert result
    return result


def find(
    folder: Path, step: int = 0, marker: Path | None = None, earlier: EarlierWorkers | None = None
) -> tuple[Path | None, str | None]:
    """The checkpoint or the refusal of a worker that must continue from ``step`` in ``folder``."""
    job = RunJob(ResolvedConfig(), run_dir=StorageDir.of(folder), step=step, driver_marker=marker)
    with ExitStack() as stack:
        return lock_and_find_checkpoint(RunFolder(folder), stack, job, earlier or EarlierWorkers())


def test_a_worker_that_is_told_why_another_gave_up_or_has_died_too_often_does_not_train(tmp_path: Path) -> None:
    assert find(tmp_path, earlier=EarlierWorkers(refusal=Refusal("the disk is full"))) == (None, "the disk is full")
    assert find(tmp_path, earlier=EarlierWorkers((0,) * (MAX_ATTEMPTS - 1))) == (None, None)
    assert "crashed 3 times after step 0" in (find(tmp_path, earlier=EarlierWorkers((0,) * MAX_ATTEMPTS))[1] or "")
    assert "cannot be used" in (find(tmp_path / "gone")[1] or "")
    (tmp_path / "file").touch()
    assert "cannot be used (Not a directory)" in (find(tmp_path / "file")[1] or "")


def test_a_worker_begins_at_the_step_that_it_is_told_or_a_later_one(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path
) -> None:
    home = RunFolder(tmp_path / "one")
    config = ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=6, checkpoint_every=3,
        device="cpu",
    )  # fmt: skip
    make_trainer(config, checkpoints=home.checkpoints).run()
    third, sixth = checkpoints_in(home.checkpoints)
    files_before = sorted(home.path.rglob("*"))
    resume, refusal = find(home.path, 6, marker=home.path / "made-by-the-driver")
    assert resume is None
    assert "--out s3://bucket/runs" in (refusal or "")
    assert files_before == sorted(home.path.rglob("*")), "nothing is overwritten"
    assert find(home.path, 6) == (sixth, None)
    assert find(home.path, 3) == (sixth, None), "a predecessor that was dying saved it"
    shutil.rmtree(sixth)
    for step, earlier in ((6, None), (0, EarlierWorkers((0, 6)))):
        resume, refusal = find(home.path, step, earlier=earlier)
        assert resume is None
        assert re.search(r"resume at step 6, .* is step 3\..* resume at step 3", refusal or "")
    assert find(home.path, 0, earlier=EarlierWorkers((0,))) == (third, None), "a worker saved it since"
    shutil.rmtree(third)
    assert "no intact checkpoint" in (find(home.path, 3)[1] or "")


def states(*workers: tuple[str | None, int, str]) -> list[WorkerState]:
    """Workers with these refusals, steps and machines."""
    return [WorkerState(refusal, step, host, host, ()) for refusal, step, host in workers]


def test_workers_that_find_different_checkpoints_train_nothing() -> None:
    assert combine_refusals(states((None, 6, "a"), (None, 6, "b"))) is None
    assert combine_refusals(states((None, 6, "a"), ("why", 6, "b"))) == "why"
    for other in (0, 8):
        differ = combine_refusals(states((None, 6, "a"), (None, 6, "b"), (None, other, "c")))
        assert differ
        assert re.search(f"step 6 on a, step {other} on c. .*object storage", differ)


def test_a_resumed_run_reads_its_checkpoint_once_to_check_it(
    home: RunFolder, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver and the worker are one process; a file that has changed is looked at again."""
    train(home, config.replace(steps=7, schedule="constant"))
    write_json(home.config, config.to_json())
    progress._checksums.clear()
    checked: list[str] = []

    def counted(path: Path) -> str:
        checked.append(path.name)
        return checksum(path)

    monkeypatch.setattr(progress, "checksum", counted)
    checkpoint = find_run(str(home.path), home.path.parent)[1]
    with ExitStack() as stack:
        assert lock_and_find_checkpoint(home, stack, job_of(home, config, step=7), EarlierWorkers()) == (
            checkpoint,
            None,
        )
        assert train(home, config.replace(schedule="constant"), checkpoint).steps == 12
    assert sorted(checked) == ["model.safetensors", "state.pt"]
    os.utime(checkpoint / "state.pt", ns=(1, 1))
    assert progress.find_damage(checkpoint) is None
    assert len(checked) == 3, "a file that was touched is read again"


def test_workers_all_start_again_with_the_smaller_size(home: RunFolder, config: ResolvedConfig) -> None:
    """Their start for that does not count as one after a crash."""
    with ExitStack() as stack:
        earlier = EarlierWorkers((0, 0, 0), failed_micro_batches=(8,))
        assert lock_and_find_checkpoint(home, stack, job_of(home, config), earlier) == (None, None), (
            "one of the starts was for that"
        )
    with ExitStack() as stack:
        earlier = replace(earlier, starts=(0, 0, 0, 0))
        assert "crashed" in str(lock_and_find_checkpoint(home, stack, job_of(home, config), earlier)[1])


def test_a_worker_that_was_killed_for_memory_is_started_again_only_from_a_later_step(
    home: RunFolder, config: ResolvedConfig
) -> None:
    """From the same one it would be killed again; a leak of days is survived by the checkpoints."""
    with ExitStack() as stack:
        earlier = EarlierWorkers((0,), out_of_memory=True)
        checkpoint, refusal = lock_and_find_checkpoint(home, stack, job_of(home, config), earlier)
    assert checkpoint is None
    assert re.search(r"Memory ran out .*step 0.*--micro-batch", refusal or "")
    check_crash_loop([0, 15], out_of_memory=True)
    check_crash_loop([15], out_of_memory=True)


def test_the_result_of_an_earlier_worker_gets_the_newest_checkpoint(
    home: RunFolder, config: ResolvedConfig, make_result: Callable[..., RunResult]
) -> None:
    result = make_result(outcome="oom", checkpoint=None)
    assert with_checkpoint(result, home) == result
    train(home, config.replace(steps=7, schedule="constant"))
    assert with_checkpoint(result, home) == replace(result, checkpoint=str(home.checkpoints / "step-00000007"))


def test_a_connection_sends_the_cycles_and_metrics_that_the_driver_lacks(config: ResolvedConfig) -> None:
    """With the machine's name in the metrics where there are several."""
    link, session = Channel(RecordedProgress(10, 60)), WorkerSession(WorkerJob(config), None, None)
    for nodes, name in ((["a"], "system/cpu"), (["a", "b"], "system/w1/cpu")):
        started = WorkerStarted(5, [f"w{number}" for number, _ in enumerate(nodes, 1)], nodes, {})
        connection = DriverConnection(link, started)
        with connection.connect(session):
            assert connection.telemetry_second == 60
            for message in (CycleDone({"step": 10}), PrintLine("a line"), SystemMetrics(60, {"system/cpu": 1.0})):
                connection.post(message)
        assert link.take_updates().messages == [started, PrintLine("a line"), SystemMetrics(60, {name: 1.0})]


def test_a_connection_passes_on_the_wish_to_stop(config: ResolvedConfig) -> None:
    link, session = Channel(RecordedProgress()), WorkerSession(WorkerJob(config), None, None)
    connection = DriverConnection(link, WorkerStarted(0, ["w1"], [""], {}))
    with connection.connect(session):
        assert not connection.should_stop()
        link.request_stop()
        assert connection._stop.wait(60)
        assert connection.should_stop()
    assert link.take_updates().activity == session.activity
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


class VanishingGpu(Callback):
    """Raises what torch raises once a GPU is gone, after a step."""

    def on_step_end(self, step: TrainStep) -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nFor debugging consider ...")


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_gpu_that_vanishes_ends_a_run_in_its_own_process_and_restarts_a_worker_of_ray(
    on_ray: bool, config: ResolvedConfig, home: RunFolder
) -> None:
    """In one line each: Ray's controller, which would print a traceback of the loop, gets another exception."""
    link = Channel(RecordedProgress())
    link.node_id = "a node of Ray" if on_ray else ""
    trainer = ray.train.torch.TorchTrainer(
        train_function,
        train_loop_config={"job": job_of(home, config), "link": link, "callbacks": (VanishingGpu(),)},
        scaling_config=ray.train.ScalingConfig(num_workers=0),
    )
    if not on_ray:
        returned: Any = trainer.fit().return_value
        assert "The GPU failed (CUDA error: unspecified launch failure)." in returned.user_error
        assert "start the run again" in returned.user_error
        return
    with pytest.raises(
        RuntimeError, match=r"The GPU of .* failed \(CUDA error: unspecified launch failure\)"
    ) as raised:
        trainer.fit()
    assert not isinstance(raised.value, torch.AcceleratorError)
    lines = [message.text for message in link.take_updates().messages if isinstance(message, PrintLine)]
    assert any("restarts the workers" in line for line in lines)
