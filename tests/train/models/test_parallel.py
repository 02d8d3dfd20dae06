"""Several workers compute what one does: the same losses at the same global batch, copied or sharded, also resumed."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from trainers import make_trainer

from train.config import Cycle, ResolvedConfig
from train.model_config import ModelConfig
from train.result import CycleReport

WORKER = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from train.config import ResolvedConfig, config_from_json
from train.loop.trainer import Callbacks
from trainers import make_trainer

dist.init_process_group("gloo")
for line in sys.stdin:
    job = json.loads(line)
    reports = []
    path = lambda name: Path(job[name]) if job[name] else None
    calls, discards, moments = iter(range(10**9)), iter(range(10**9)), iter(range(10**9))
    callbacks = Callbacks(
        reports.append, should_stop=lambda: next(calls) + 1 >= job["stop"],
        should_discard=lambda: next(discards) + 1 >= job["discard"], clock=lambda: next(moments) * job["clock"],
    )
    trainer = make_trainer(
        ResolvedConfig.from_resolved(config_from_json(job["config"], "test")), callbacks=callbacks,
        checkpoints=path("checkpoints"), resume=path("resume"),
    )
    result = trainer.run()
    assert not (dist.get_rank() and reports), "only the first worker reports"
    losses = [[r.step, r.step_losses, r.val_loss] for r in reports]
    print(json.dumps([result.outcome, result.steps, result.checkpoint, losses]), flush=True)
os._exit(0)  # gloo's thread may still hold a tensor and abort while Python ends (pytorch/pytorch, issue 190489)
"""
WORKERS = 2

Together = Callable[..., tuple[str, int, str | None, list[Any]]]


@pytest.fixture(scope="module")
def train_together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """Outcome, steps, checkpoint and losses of a config run by two processes, which stay for the next."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{Path(__file__).parents[1]}",
    }  # fmt: skip
    stderr_file = tmp_path_factory.mktemp("workers") / "stderr"
    with ExitStack() as started:
        errors = started.enter_context(stderr_file.open("w"))
        workers = [
            started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER], env=environment | {"RANK": str(rank)},
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                )
            )
            for rank in range(WORKERS)
        ]  # fmt: skip

        def train(config: ResolvedConfig, **options: Any) -> tuple[str, int, str | None, list[Any]]:
            assert config.batch.workers == WORKERS
            job = {"config": config.to_json(), "checkpoints": None, "resume": None} | options
            job = {"stop": 10**9, "discard": 10**9, "clock": 0.0} | job
            for worker in workers:
                print(json.dumps(job), file=worker.stdin, flush=True)
            ended = [worker.stdout.readline() for worker in workers if worker.stdout]
            assert all(ended), stderr_file.read_text()
            return json.loads(ended[0])

        yield train
        for worker in workers:
            worker.kill()


def train_alone(config: ResolvedConfig) -> list[Any]:
    reports: list[CycleReport] = []
    make_trainer(config, on_cycle=reports.append).run()
    return [[r.step, r.step_losses, r.val_loss] for r in reports]


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=8, micro_batch=2, steps=14, cycle=Cycle(5, 2),
        precision="fp32", device="cpu", learning_rate=3e-3, warmup_steps=5, optimizer="adamw",
    )  # fmt: skip


def same(actual: list[Any], expected: list[Any]) -> None:
    assert [step for step, _, _ in actual] == [step for step, _, _ in expected]
    for (_, losses, val), (_, wanted, wanted_val) in zip(actual, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert val == pytest.approx(wanted_val, rel=1e-4)


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_workers_compute_what_one_does(config: ResolvedConfig, train_together: Together, fsdp: bool) -> None:
    """Validation too: of 125 windows the last five do not fill the batches of both, and the very last that of one."""
    config = config.replace(cycle=Cycle(7, 20))
    outcome, steps, _, losses = train_together(config.replace(workers=2, fsdp=fsdp, loss_chunks=2))
    assert (outcome, steps) == ("finished", 14)
    same(losses, train_alone(config))


def test_dropout_continues_on_every_worker(config: ResolvedConfig, train_together: Together, tmp_path: Path) -> None:
    together = config.replace(workers=2, model=dataclasses.replace(config.model, dropout=0.2))
    *_, straight = train_together(together)
    _, steps, saved, initial = train_together(together, checkpoints=str(tmp_path), stop=7)
    assert steps == 7
    *_, after = train_together(together, checkpoints=str(tmp_path), resume=saved)
    assert [*initial, *after] == straight


def test_sharded_and_alone_continue_each_other(
    config: ResolvedConfig, train_together: Together, tmp_path: Path
) -> None:
    together = config.replace(workers=2, fsdp=True)
    outcome, steps, saved, initial = train_together(together, checkpoints=str(tmp_path), stop=7)
    assert (outcome, steps) == ("interrupted", 7)
    assert saved
    reports: list[CycleReport] = []
    alone = make_trainer(
        config.replace(micro_batch=4), on_cycle=reports.append, checkpoints=tmp_path, resume=Path(saved),
        should_stop=lambda: len(reports) > 0,
    )  # fmt: skip
    middle = alone.run()
    assert middle.checkpoint
    _, _, _, after = train_together(together, checkpoints=str(tmp_path), resume=middle.checkpoint)
    same([*initial, *([r.step, r.step_losses, r.val_loss] for r in reports), *after], train_alone(config))


@pytest.mark.parametrize("fsdp", [False, True])
def test_workers_agree_on_what_a_clock_decides(
    config: ResolvedConfig, train_together: Together, tmp_path: Path, fsdp: bool
) -> None:
    """By a clock that is three seconds later at each reading: cycles by time, and a long step that is discarded."""
    alone = [loss for _, losses, _ in train_alone(config) for loss in losses]
    together = config.replace(workers=WORKERS, micro_batch=2, fsdp=fsdp, cycle=Cycle())
    outcome, steps, saved, first = train_together(together, checkpoints=str(tmp_path), clock=3.0, discard=6)
    assert outcome == "interrupted"
    assert 0 < steps < 14
    assert saved
    outcome, _, _, second = train_together(together, checkpoints=str(tmp_path), resume=saved, clock=3.0)
    assert outcome == "finished"
    losses = [loss for _, losses, _ in (*first, *second) for loss in losses]
    assert losses == pytest.approx(alone, rel=1e-4)
    assert len(first) > 0
    assert [val_loss for _, _, val_loss in second][-1] is not None


def test_workers_end_a_time_budget_together(config: ResolvedConfig, train_together: Together) -> None:
    together = config.replace(workers=WORKERS, micro_batch=2, cycle=Cycle(), steps=None, time_budget=300.0)
    outcome, steps, _, cycles = train_together(together, clock=3.0)
    assert outcome == "finished"
    assert 1 < steps == cycles[-1][0]
